"""What each engine makes of an export, by its own rules, and what is said where it is not what was trained."""

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import Source, checked_config, export, write_zlab
from dflash_offline.train.export.folders import read_folder
from dflash_offline.train.export.inherited import inherited_rows, require_known
from dflash_offline.train.export.serving import READ, attention_in_sglang, attention_in_vllm, missing_keys
from dflash_offline.train.export.zlab import zlab_config

BY_SGLANG = ("full", "sliding causal", "mixed causal", "four and one")
NAMES = [*BY_SGLANG, "full causal", "sliding", "mixed", "mixed all causal"]


@pytest.mark.parametrize("name", NAMES)
def test_vllm_runs_every_layout_and_sglang_those_it_knows(tiny_spec, shelf, name) -> None:
    attention = shelf.LAYOUTS[name]
    config = zlab_config(tiny_spec(attention=attention, num_layers=len(attention)), shelf.TARGET, "bfloat16")
    assert attention_in_vllm(config) == attention
    assert (attention_in_sglang(config) == attention) == (name in BY_SGLANG)


@pytest.mark.parametrize("name", NAMES)
def test_an_export_for_sglang_of_layers_it_does_not_run_is_refused(write_drafter, tmp_path, shelf, name) -> None:
    path, drafter = write_drafter(attention=shelf.LAYOUTS[name])
    config = ExportConfig(out=str(tmp_path / "out"), format="sglang")
    if name in BY_SGLANG:
        report = export(path, config)
        assert [command.split()[2] for command in report.commands] == ["sglang.launch_server"]
        assert read_folder(tmp_path / "out").spec == drafter.spec
        return
    with pytest.raises(UserError, match="SGLang would not run this drafter as trained: it would run") as caught:
        export(path, config)
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "out").exists()


def test_mixed_layers_need_vllms_second_runner(write_drafter, tmp_path, shelf) -> None:
    path, _ = write_drafter(attention=shelf.LAYOUTS["mixed"])
    report = export(path, ExportConfig(out=str(tmp_path / "vllm"), format="vllm"))
    assert len(report.commands) == 1
    assert report.commands[0].startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve")
    assert '"num_speculative_tokens": 7' in report.commands[0]
    for told in (report.text(), (tmp_path / "vllm" / "README.md").read_text()):
        assert "need vLLM's V2 model runner" in told
    plain, _ = write_drafter()
    assert "V2" not in export(plain, ExportConfig(out=str(tmp_path / "plain"), format="vllm")).text()


@pytest.mark.parametrize("served", ["sglang", "vllm"])
@pytest.mark.parametrize(
    "changes",
    [{"embedding_scale": 5.5}, {"logit_softcap": 30.0}, {"output_multiplier": 0.5}],
    ids=lambda c: next(iter(c)),
)
def test_what_an_engine_does_not_read_is_refused_by_name(write_drafter, tmp_path, served, changes) -> None:
    path, _ = write_drafter(**changes)
    config = ExportConfig(out=str(tmp_path / "out"), format=served)
    if (served, *changes) == ("vllm", "output_multiplier"):
        export(path, config)  # as logit_scale
        return
    with pytest.raises(UserError, match=f"it reads no key for the target's {next(iter(changes))}") as caught:
        export(path, config)
    assert "--format zlab" in caught.value.advice
    text = export(path, ExportConfig(out=str(tmp_path / "zlab"))).text()
    name = {"sglang": "SGLang", "vllm": "vLLM"}[served]
    assert f"no command for {name}: it reads no key for the target's {next(iter(changes))}" in text


@pytest.mark.parametrize("served", READ)
def test_a_key_that_a_reader_takes_is_never_left_out(write_drafter, shelf, tmp_path, served) -> None:
    _, drafter = write_drafter()
    source = Source(spec=drafter.spec, state=drafter.state_dict(), target=shelf.TARGET, training=[])
    content = checked_config(tmp_path, served, source)
    assert missing_keys(served, content) == []
    for name in READ[served]:
        place, parts = content, name.split(".")
        for part in parts[:-1]:
            place = place[part]
        kept = place.pop(parts[-1])
        assert name in missing_keys(served, content)
        place[parts[-1]] = kept


CHANGES = {
    "missing": {"fc.weight": None},
    "extra": {"lm_head.weight": torch.zeros(2, 2)},
    "shape": {"norm.weight": torch.zeros(3)},
    "dtype": {"norm.weight": torch.zeros(32, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("fault", CHANGES)
def test_tensors_that_do_not_fit_are_seen_before_a_file_is_written(write_drafter, shelf, tmp_path, fault) -> None:
    _, drafter = write_drafter()
    state = {name: tensor for name, tensor in (drafter.state_dict() | CHANGES[fault]).items() if tensor is not None}
    with pytest.raises(UserError, match="do not fit its config"):
        write_zlab(tmp_path / "out", drafter.spec, state, shelf.TARGET, "card")
    assert not (tmp_path / "out").exists()


ROPES = [
    ({"rope_type": "default", "rope_theta": 1e6}, "plain, theta 1e+06, over the whole head"),
    ({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, "the target's yarn is not inherited"),
    (
        {"rope_type": "longrope", "rope_theta": 1e6, "short_factor": [1], "long_factor": [2]},
        "longrope is not inherited",
    ),
    (
        {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1], "partial_rotary_factor": 0.25},
        "the target's mrope and partial rotation is not inherited",
    ),
]


@pytest.mark.parametrize("rope, told", ROPES, ids=[told for _, told in ROPES])
def test_the_card_says_which_rotation_is_not_inherited(tiny_spec, rope, told) -> None:
    require_known({"rope": rope})
    rows = dict(inherited_rows(tiny_spec(rope_theta=float(rope["rope_theta"])), {"rope": rope}))
    assert told in rows["rotary embedding"]


@pytest.mark.parametrize(
    "rope, told",
    [
        ({"rope_type": "spiral", "rope_theta": 1e6}, "unknown kind 'spiral'"),
        ({"rope_type": "default", "rope_theta": 1e6, "twist": 2}, "hold twist = 2"),
    ],
)
def test_an_unknown_rotation_of_the_target_is_refused_by_name(
    tiny_spec, tiny_drafter, shelf, tmp_path, rope, told
) -> None:
    drafter = tiny_drafter(tiny_spec())
    source = Source(spec=drafter.spec, state=drafter.state_dict(), target=shelf.TARGET | {"rope": rope}, training=[])
    with pytest.raises(UserError, match=told) as caught:
        checked_config(tmp_path, "zlab", source)
    assert len(str(caught.value).splitlines()) == 3


def test_scales_and_caps_are_lines_of_the_card(tiny_spec) -> None:
    spec = tiny_spec(embedding_scale=5.5, output_multiplier=0.25, logit_softcap=30.0)
    rows = dict(inherited_rows(spec, {}))
    assert (rows["embedding"], rows["logits"], rows["logit softcap"]) == (
        "rows times 5.5, as in the target",
        "times 0.25, as in the target",
        "30, as in the target",
    )
