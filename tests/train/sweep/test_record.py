"""sweep.json: read back as written, taken up by more runs, refused for other settings."""

import dataclasses
import json
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.train.sweep.record import RunRecord, Sweep, merged, read_sweep

MANIFEST = {"target": {"name": "t"}, "tap_layers": [0, 2], "codec": "raw", "num_segments": 4, "plan_sha256": "ab" * 32}


def sweep_of(folder: Path, overrides: list[dict], **changes) -> Sweep:
    runs = [RunRecord(number=number, overrides=run) for number, run in enumerate(overrides, start=1)]
    fields = {"manifest": MANIFEST, "strategy": "grid", "count": None, "seed": None, "fields": ["seed"]}
    fields |= {"base": {"steps": 12, "stall_s": 60}, "halving": {"steps": [4], "keep": 0.5}, "store": "/store"}
    return Sweep(folder=folder, runs=runs, **(fields | changes))


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    sweep = sweep_of(tmp_path, [{"seed": 1}, {"drafter.taps": [0, 2]}])
    sweep.runs[0].rungs = [{"step": 4, "acceptance_length": 1.5, "acceptance_length_cycles": 1.4, "is_kept": True}]
    sweep.runs[1].error = "it broke"
    sweep.segments, sweep.snapshot = "0-1,3", "cd" * 32
    sweep.ranking = [1]
    sweep.write()
    assert read_sweep(tmp_path) == sweep
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content["name"] == tmp_path.name
    assert [run["folder"] for run in content["runs"]] == ["runs/0001", "runs/0002"]
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_the_page_names_every_key(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "sweeps.md").read_text()
    sweep = sweep_of(tmp_path, [{"seed": 1}])
    sweep.write()
    content = json.loads((tmp_path / "sweep.json").read_text())
    for name in [*content, *content["runs"][0]]:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    "text, told", [("{", "is broken"), ('{"format": 2}', "is broken"), ('{"format": 9}', "format 9")]
)
def test_a_record_that_is_none_is_refused(tmp_path, text, told):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match=told):
        read_sweep(tmp_path)


@pytest.mark.parametrize("segments", ["0-4", "none of them"])
def test_segments_that_the_store_cannot_have_are_refused(tmp_path, segments):
    sweep_of(tmp_path, [{"seed": 1}], segments=segments).write()
    with pytest.raises(UserError, match="is broken"):
        read_sweep(tmp_path)


def test_added_runs_come_behind_the_old_ones(tmp_path):
    old = sweep_of(tmp_path, [{"seed": 1}, {"seed": 3}])
    old.runs[1].state, old.runs[1].step = "finished", 12
    before = dataclasses.replace(old.runs[1])
    new = merged(old, sweep_of(tmp_path, [{"seed": 1}, {"seed": 2}, {"seed": 3}], base={"steps": 12, "stall_s": 9}))
    assert [(run.number, run.overrides["seed"]) for run in new.runs] == [(1, 1), (2, 3), (3, 2)]
    assert new.runs[1] == before
    assert new.base["stall_s"] == 9


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"base": {"steps": 13}}, "train.steps was 12 and is now 13"),
        ({"base": {"steps": 12, "noise": 0.1}}, "train.noise was None and is now 0.1"),
        ({"halving": None}, "halving was {'steps': [4], 'keep': 0.5} and is now None"),
        ({"manifest": MANIFEST | {"plan_sha256": "cd" * 32}}, "store.plan_sha256 was 'abababab"),
        ({"manifest": MANIFEST | {"tap_layers": [2]}}, "store.tap_layers was [0, 2] and is now [2]"),
        ({"manifest": MANIFEST | {"codec": "int8:4"}}, "store.codec was 'raw' and is now 'int8:4'"),
        ({"manifest": MANIFEST | {"target": {"name": "u"}}}, "store.target.name was 't' and is now 'u'"),
        ({"overrides": [{"seed": 1}]}, "run 2 (seed=2) is no longer among them"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, changes, told):
    overrides = changes.pop("overrides", [{"seed": 1}, {"seed": 2}])
    with pytest.raises(UserError) as caught:
        merged(sweep_of(tmp_path, [{"seed": 1}, {"seed": 2}]), sweep_of(tmp_path, overrides, **changes))
    assert told in caught.value.happened


def test_runs_that_come_too_late_to_a_rung_are_refused(tmp_path):
    old = sweep_of(tmp_path, [{"seed": 1}])
    more = sweep_of(tmp_path, [{"seed": 1}, {"seed": 2}])
    old.runs[0].rungs = [{"step": 4, "acceptance_length": 1.0, "acceptance_length_cycles": 1.0, "is_kept": None}]
    assert len(merged(old, more).runs) == 2
    old = sweep_of(tmp_path, [{"seed": 1}])
    old.runs[0].rungs = [{"step": 4, "acceptance_length": 1.0, "acceptance_length_cycles": 1.0, "is_kept": True}]
    with pytest.raises(UserError, match="1 runs were added, and the rung at step 4 is decided"):
        merged(old, more)
