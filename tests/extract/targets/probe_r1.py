import pytest, torch, random
from target_families import VERIFIED, Family, REFUSED, SECTIONS
import target_families
import dataclasses
from test_batch_session import Walk, TAPS, uncached, can_batch
from dflash_offline.extract.targets.session import Session


NEW = {
 "llama4-chunk": dataclasses.replace(VERIFIED["llama4"], fields=VERIFIED["llama4"].fields | {"attention_chunk_size": 8}),
}
@pytest.mark.parametrize("name", list(NEW))
def test_x(family_folder, loaded, name):
    import sys
    fam = [m for m in list(sys.modules.values()) if "FAMILIES" in vars(m) and isinstance(vars(m)["FAMILIES"], dict)]
    for m in fam: m.FAMILIES[name]=NEW[name]
    t = loaded(name)
    print(t.single_reason, t.model.config.attention_chunk_size if hasattr(t.model.config,'attention_chunk_size') else None, t.model.config.layer_types)
    # session alone
    ids=[random.Random(1).randrange(6,262) for _ in range(40)]
    s=t.open(TAPS); out=[]
    pos=0
    for n in (7,1,1,5,3,8,15):
        out.append(s.forward(torch.tensor(ids[pos:pos+n]))[0]); pos+=n
    e,_=uncached(t,ids)
    print("alone err", (torch.cat(out)-e).abs().max(-1).values)
    w=Walk(t,3)
    for number, length in enumerate((7, 20, 2)):
        w.begin(number, length)
    for _ in range(6): w.forward()
