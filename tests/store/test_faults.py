"""Fault injection: six kinds of damage in every kind of file of a store, found by `verify` and by reading.

What is no fault, because everything still holds: a deleted `index.arrow` beside all commits (they say the same), and
a stale file that is byte for byte the current one. A commit beside a sound `index.arrow` is found by `verify` alone;
reading does not need it, so commits are damaged in a store without that file.
"""

import itertools
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.store.frozen import read_frozen, write_frozen
from dflash_offline.store.index import write_consolidated
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.samples import SampleTable, SampleWriter
from dflash_offline.store.summary import verify_text
from dflash_offline.store.writer import StoreWriter, create_store

CODECS = ("raw", "zstd", "int8:3")
PAGE_BYTES = 4096

# kind of file -> its path, a file to exchange it with, whether the store has an index.arrow
KINDS: dict[str, tuple[str, str, bool]] = {
    "manifest": ("zarr.json", "hidden/zarr.json", True),
    "hidden array": ("hidden/zarr.json", "last/zarr.json", True),
    "last array": ("last/zarr.json", "zarr.json", True),
    "plan": ("plan/index.arrow", "index.arrow", True),
    "tokens": ("plan/tokens-00001.arrow", "plan/tokens-00000.arrow", True),
    "commit": ("commits/00000001.arrow", "commits/00000000.arrow", False),
    "consolidated index": ("index.arrow", "plan/index.arrow", True),
    "hidden segment": ("hidden/c.1.0.0", "hidden/c.2.0.0", True),
    "last segment": ("last/c.1.0.0", "last/c.2.0.0", True),
    "frozen facts": ("frozen/config.json", "hidden/zarr.json", True),
    "frozen tensors": ("frozen/frozen.safetensors", "hidden/c.0.0.0", True),
}
FAULTS = ("flipped bit", "truncated", "zeroed page", "swapped", "stale", "deleted")
DRAWN = ("flipped bit", "truncated", "zeroed page")  # at a random place
NO_FAULT = {("consolidated index", "deleted")}
# what a stale file contradicts, where a reader cannot tell which of the two is wrong
OTHERS = {"commit": ["hidden/c.1.0.0"], "consolidated index": ["hidden/c.0.0.0"]}
LARGE = ("hidden segment", "last segment", "tokens", "plan", "frozen tensors")


@dataclass(frozen=True)
class Stores:
    """One sound store, and two of the same shape that stale files come from."""

    sound: Path
    other: Path  # same plan, other tokens, states, target
    longer: Path  # another plan and codec


def build(folder: Path, small: ModuleType, codec: str, *, seed: int, num_samples: int = 24) -> Path:
    """A store with everything: `seed` decides tokens, states and target, never the shape."""
    with SampleWriter(folder / "data", rows_per_file=9) as writer:
        for number, length in enumerate(small.lengths(num_samples).tolist()):
            ids = np.random.default_rng([seed, number]).integers(0, 1000, size=length)
            writer.add(ids, np.ones(length), split="train", task="chat", source="a.jsonl", source_line=number + 1)
    plan = small.make_plan(SampleTable(folder / "data"))
    manifest: Manifest = small.make_manifest(plan, codec=codec)
    target = manifest.target | {"weights_sha256": f"{seed:064d}", "vocab_size": 900}
    fingerprint = SampleTable(folder / "data").fingerprint()
    manifest = replace(manifest, target=target, data=manifest.data | {"fingerprint": fingerprint})
    store = folder / "store"
    create_store(store, manifest, plan, folder / "data")
    store_writer = StoreWriter(store, manifest)
    for segment in range(manifest.num_segments):
        sink = store_writer.open(segment)
        for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
            planes = small.states(sample_id + 10_000 * seed, n)
            sink.append(sample_id, position, planes, small.states(sample_id + 10_000 * seed + 5_000, n, 1)[0])
        sink.commit({"host": "somewhere"})
    generator = torch.Generator().manual_seed(seed)
    embedding, norm = torch.randn(900, 8, generator=generator), torch.randn(8, generator=generator)
    write_frozen(store, {"embedding": embedding, "norm": norm}, target)
    assert write_consolidated(store, manifest.identity_sha256, manifest.num_segments)
    assert manifest.num_segments >= 3
    return store


@pytest.fixture(scope="module")
def make_stores(tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> Callable[[str], Stores]:
    made: dict[str, Stores] = {}

    def make(codec: str) -> Stores:
        if codec not in made:
            folder = tmp_path_factory.mktemp(codec.replace(":", "-"))
            made[codec] = Stores(
                build(folder / "sound", small, codec, seed=1),
                build(folder / "other", small, codec, seed=2),
                build(folder / "longer", small, "raw" if codec != "raw" else "zstd", seed=3, num_samples=25),
            )
        return made[codec]

    return make


def read_everything(store: Path) -> None:
    """Opens a store and reads whatever it says is there."""
    with StoreReader(store) as reader:
        width = reader.manifest.hidden_size
        for i in range(len(reader)):
            n = int(reader.samples.n[i])
            reader.read(i, np.empty((len(reader.manifest.tap_layers), n, width), dtype=np.uint16))
            reader.read_last(i, np.empty((n, width), dtype=np.uint16))
            ids, mask = reader.tokens(i)
            assert len(ids) == len(mask) > n
    read_frozen(store)


def spoil(data: bytes, fault: str, draw: np.random.Generator) -> bytes:
    """The bytes of a file with one fault at a random place."""
    spoiled = bytearray(data)
    if fault == "flipped bit":
        spoiled[draw.integers(len(data))] ^= 1 << int(draw.integers(8))
    elif fault == "truncated":
        del spoiled[draw.integers(len(data)) :]
    else:
        first = int(draw.integers(-(-len(data) // PAGE_BYTES))) * PAGE_BYTES
        spoiled[first : first + PAGE_BYTES] = bytes(len(spoiled[first : first + PAGE_BYTES]))
    return bytes(spoiled)


def inflict(store: Path, stores: Stores, kind: str, fault: str, draw: np.random.Generator) -> None:
    """Damages one file of a store; what it leaves differs from what was there."""
    name, partner, has_index = KINDS[kind]
    path, before = store / name, (store / name).read_bytes()
    if not has_index:
        (store / "index.arrow").unlink()
    if fault == "deleted":
        path.unlink()
        return
    if fault == "swapped":
        path.write_bytes((store / partner).read_bytes())
        (store / partner).write_bytes(before)
    elif fault == "stale":
        stale = (stores.other / name).read_bytes()
        path.write_bytes(stale if stale != before else (stores.longer / name).read_bytes())
    else:
        path.unlink()  # a hard link of DATA's file, whose copy stays
        path.write_bytes(next(data for data in iter(lambda: spoil(before, fault, draw), None) if data != before))
    assert path.read_bytes() != before


def cases(codec: str, count: int) -> Iterator[tuple[str, str, int]]:
    """Every kind of file and fault; a fault at a random place `count` times, in large files twice as often."""
    for kind, fault in itertools.product(KINDS, FAULTS):
        for number in range(count * (1 + (kind in LARGE)) if fault in DRAWN else 1):
            yield kind, fault, number


def require_found(copy: Path, stores: Stores, codec: str, kind: str, fault: str, number: int) -> list[str]:
    """Inflicts one fault on a fresh copy and gives what missed it, or broke on it."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(stores.sound, copy)
    draw = np.random.default_rng(zlib.crc32(f"{codec} {kind} {fault} {number}".encode()))
    inflict(copy, stores, kind, fault, draw)
    missed, is_fault = [], (kind, fault) not in NO_FAULT
    name = KINDS[kind][0]
    for look in (verify_all, read_everything):
        try:
            look(copy)
            outcome = "found nothing"
        except UserError as error:
            outcome = "" if is_fault and names(error, copy, kind, fault) else f"said {error.happened!r}"
        except Exception as error:
            outcome = f"broke with {type(error).__name__}: {error}"
        if outcome and not (outcome == "found nothing" and not is_fault):
            missed.append(f"{codec}: {name} {fault} ({number}): {look.__name__} {outcome}")
    return missed


def verify_all(store: Path) -> None:
    report = verify(store, workers=1)
    if report.faults or report.uncommitted:
        raise UserError(verify_text(report), "", "")


def names(error: UserError, store: Path, kind: str, fault: str) -> bool:
    """True where the message names a file that was changed, or for a deleted one what it made incomplete."""
    name, partner, _ = KINDS[kind]
    shown = [name, partner] if fault == "swapped" else [name]
    if fault == "stale":
        shown += OTHERS.get(kind, [])
    if fault == "deleted":
        shown += [f"no store at {str(store)!r}", f"the store {str(store)!r} is not complete", "segments 1;"]
    return any(word in error.happened for word in shown)


@pytest.mark.parametrize("codec", CODECS)
def test_the_stores_are_sound(make_stores: Callable[[str], Stores], codec: str) -> None:
    stores = make_stores(codec)
    for store in (stores.sound, stores.other, stores.longer):
        verify_all(store)
        read_everything(store)
        for kind in ("hidden segment", "tokens", "frozen tensors"):
            assert (store / KINDS[kind][0]).stat().st_size > PAGE_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_is_found_raw(make_stores: Callable[[str], Stores], tmp_path: Path, kind: str) -> None:
    stores = make_stores("raw")
    chosen = [case for case in cases("raw", 3) if case[0] == kind]
    missed = [text for case in chosen for text in require_found(tmp_path / "copy", stores, "raw", *case)]
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("codec", CODECS[1:])
def test_every_fault_of_states_is_found(make_stores: Callable[[str], Stores], tmp_path: Path, codec: str) -> None:
    stores = make_stores(codec)
    chosen = [case for case in cases(codec, 2) if "segment" in case[0]]
    missed = [text for case in chosen for text in require_found(tmp_path / "copy", stores, codec, *case)]
    assert not missed, "\n".join(missed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS)
def test_many_faults_are_found(make_stores: Callable[[str], Stores], tmp_path: Path, codec: str, kind: str) -> None:
    stores = make_stores(codec)
    chosen = [case for case in cases(codec, 10) if case[0] == kind]
    missed = [text for case in chosen for text in require_found(tmp_path / "copy", stores, codec, *case)]
    assert not missed, "\n".join(missed)


def test_there_are_enough_cases() -> None:
    """What the two fast tests and the slow one inject."""
    raw = len(list(cases("raw", 3)))
    states = sum("segment" in case[0] for codec in CODECS[1:] for case in cases(codec, 2))
    assert raw + states >= 200
    assert len(CODECS) * len(list(cases("raw", 10))) >= 1_500
