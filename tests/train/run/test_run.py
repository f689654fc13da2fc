"""A command against the store and the run in RUN: defaults filled in, changes refused or accepted."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.settings import resolve
from dflash_offline.settings_text import as_toml
from dflash_offline.store.manifest import read_manifest
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.facts import HARMLESS, read_facts
from dflash_offline.train.run import Run, check_run, interval, require_unchanged, write_run


def check(config: TrainConfig) -> Run:
    return check_run(config, lambda: "cpu")


def test_the_resolved_config_repeats_the_run(lab, tiny_store, tmp_path, reference_run):
    repeated = resolve(TrainConfig, name="train", file=reference_run / "train.toml")
    assert not check(repeated).is_new
    assert repeated.rows.row_tokens == 128
    assert repeated.drafter.mask_token_id == 60
    assert as_toml(repeated, "train") == (reference_run / "train.toml").read_text()


def test_more_anchors_than_a_row_has_tokens_are_refused(lab, tiny_store, tmp_path):
    config = lab.make_config(tiny_store, tmp_path / "run", "rows.anchors=128")
    assert check(config).facts.anchors == 128
    with pytest.raises(UserError, match=r"rows\.anchors = 144, and a row has 128 tokens") as caught:
        check(lab.make_config(tiny_store, tmp_path / "run", "rows.anchors=144"))
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(UserError, match=r"rows\.anchors = 4194304, and a row has 512 tokens"):
        check(lab.make_config(tiny_store, tmp_path / "run", "rows.anchors=4194304", "rows.row_tokens=none"))


CHANGES = [
    ("drafter.mask_token_id=61", "drafter.mask_token_id was 60 and is now 61"),
    ("drafter.block_size=7", "drafter.block_size was 8 and is now 7"),
    ("drafter.taps=[0,3]", r"drafter.tap_layers was \[0, 2, 3\] and is now \[0, 3\]"),
    ("drafter.taps=[2,0,3]", r"drafter.tap_layers was \[0, 2, 3\] and is now \[2, 0, 3\]"),
    ("drafter.num_layers=3", "drafter.num_layers was 2 and is now 3"),
    ("drafter.window=9", "drafter.attention was '2 x full' and is now '2 x sliding 9'"),
    ("drafter.causal=all", "drafter.attention was '2 x full' and is now '2 x full causal'"),
    ("drafter.intermediate_size=64", "drafter.intermediate_size was 48 and is now 64"),
    ("seed=1", "seed was 0 and is now 1"),
    ("steps=13", "steps was 12 and is now 13"),
    ("dtype=bfloat16", "dtype was 'float32' and is now 'bfloat16'"),
    ("eval_samples=3", "eval_samples was 256 and is now 3"),
    ("rows.row_tokens=256", "rows.row_tokens was 128 and is now 256"),
    ("rows.anchors=32", "rows.anchors was 16 and is now 32"),
    ("rows.rows_per_step=2", "rows.rows_per_step was 1 and is now 2"),
    ("rows.shuffle_segments=1", "rows.shuffle_segments was 32 and is now 1"),
    ("loss.gamma=3.0", "loss.gamma was None and is now 3.0"),
    ("loss.weights=dpace", "loss.weights was 'decay' and is now 'dpace'"),
    ("optim.lr=0.02", "optim.lr was 0.01 and is now 0.02"),
    ("optim.name=adamw", "optim.name was 'muon' and is now 'adamw'"),
    ("optim.schedule=cosine", "optim.schedule was 'wsd' and is now 'cosine'"),
]


@pytest.mark.parametrize("change, message", CHANGES, ids=[change for change, _ in CHANGES])
def test_a_resume_with_another_setting_is_refused(lab, tiny_store, reference_run, change, message):
    with pytest.raises(UserError, match=message) as caught:
        check(lab.make_config(tiny_store, reference_run, change))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "changes, name",
    [({"seed": 1}, "store.data.facts.seed was 0 and is now 1"), ({"taps": (0, 2, 4)}, r"store.tap_layers was .*4\]")],
)
def test_a_resume_on_another_store_is_refused(lab, tmp_path, reference_run, changes, name):
    other = lab.make_store(tmp_path, **changes)
    with pytest.raises(UserError, match=name):
        check(lab.make_config(other, reference_run))


def test_a_resume_with_another_slot_meaning_is_refused(lab, tiny_store, tmp_path, reference_run):
    facts = json.loads((reference_run / "run.json").read_text())
    facts["spec"]["slot_meaning"] = "slot k predicts the token after its own position"
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="slot k predicts the token after its own position"):
        check(lab.make_config(tiny_store, tmp_path))


@pytest.mark.parametrize(
    "path, value",
    [("num_held_out", "x"), ("num_train", None), ("dtype", True), ("seed", False), ("steps", 1.5), ("loss", [])]
    + [("spec.block_size", "8"), ("spec.rope_theta", None), ("spec.attention.0.window", "wide\nand more")],
)
def test_a_fact_of_another_type_is_named(tmp_path, reference_run, path, value):
    facts = json.loads((reference_run / "run.json").read_text())
    *parents, name = (int(word) if word.isdecimal() else word for word in path.split("."))
    place = facts
    for parent in parents:
        place = place[parent]
    place[name] = value
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=f"is broken: {name} is") as caught:
        read_facts(tmp_path)
    assert len(str(caught.value).splitlines()) == 3


def test_harmless_changes_are_accepted(lab, tiny_store, tmp_path, reference_run):
    moved = tmp_path / "moved"
    moved.symlink_to(tiny_store)
    changes = ["partial=true", "eval_every=5", "checkpoint_every=2", "keep=9", "cpu_threads=2", "loader_slots=5"]
    changes += [
        "loader_threads=3",
        "uncached=true",
        "stall_s=99.0",
        "loss.chunk_blocks=2",
        "devices=auto",
    ]
    run = check(lab.make_config(moved, reference_run, *changes))
    assert not run.is_new
    assert run.facts.identity() == read_facts(reference_run).identity()


def test_a_segment_redone_with_other_states_is_another_store(lab, tmp_path):
    """An exact redo, as after a repair, changes nothing; other states would continue a run on other data."""
    store, config = lab.make_store(tmp_path / "made"), lab.make_config(tmp_path / "made/store", tmp_path / "run")
    run = check(config)
    (tmp_path / "run").mkdir()
    write_run(run)
    manifest = read_manifest(store)
    lab.fill_segments(store, manifest, range(1, 2))
    assert not check(config).is_new
    lab.fill_segments(store, manifest, range(1, 2), shift=1000)
    with pytest.raises(UserError, match=f"snapshot was '{run.facts.snapshot}' and is now '") as caught:
        check(config)
    assert len(str(caught.value).splitlines()) == 3


def test_every_setting_is_harmless_or_part_of_the_identity(reference_run):
    identity = set(read_facts(reference_run).identity())
    fields = {f.name for f in dataclasses.fields(TrainConfig)} - {"drafter", "rows", "loss", "optim"}
    config = TrainConfig()
    for section in ("drafter", "rows", "loss", "optim"):
        fields |= {f"{section}.{f.name}" for f in dataclasses.fields(getattr(config, section))}
    resolved_as = {"drafter.taps": "drafter.tap_layers", "epochs": "steps"}
    resolved_as |= dict.fromkeys(("drafter.window", "drafter.layer_types", "drafter.causal"), "drafter.attention")
    for name in fields:
        assert (resolved_as.get(name, name) in identity) != (name in HARMLESS), name


def test_an_unfinished_run_of_another_device_keeps_its_numbers(lab, tiny_store, tmp_path):
    settings = ("drafter.head_dim=16", "steps=0", "rows.row_tokens=none", "rows.anchors=none")
    config = lab.make_config(tiny_store, tmp_path / "run", *settings)
    (tmp_path / "run").mkdir()
    write_run(check(config))
    run = check_run(config, lambda: "cuda")
    assert (run.facts.device_type, run.facts.dtype, run.facts.row_tokens) == ("cpu", "float32", 512)
    fresh = dataclasses.replace(config, out=str(tmp_path / "other"))
    facts = check_run(fresh, lambda: "cuda").facts
    assert (facts.device_type, facts.dtype, facts.row_tokens, facts.anchors) == ("cuda", "bfloat16", 16384, 2048)


@pytest.mark.parametrize("is_new", [True, False])
def test_heads_too_narrow_for_a_card_are_refused_there(lab, tiny_store, tmp_path, is_new):
    """Compiling would fail, deep inside of torch; a run that was begun on a CPU may go on there."""
    config = lab.make_config(tiny_store, tmp_path / "run", "drafter.head_dim=14")
    if not is_new:
        (tmp_path / "run").mkdir()
        write_run(check(config))
    with pytest.raises(UserError, match="drafter.head_dim = 14 on a CUDA device") as caught:
        check_run(config, lambda: "cuda")
    assert len(str(caught.value).splitlines()) == 3
    assert "at least 16," in caught.value.expected
    assert (tmp_path / "run").exists() != is_new
    assert check(config).is_new == is_new
    wide = lab.make_config(tiny_store, tmp_path / "wide", "drafter.head_dim=16")
    assert check_run(wide, lambda: "cuda").facts.spec.head_dim == 16


@pytest.mark.parametrize("epochs, rows", [(1.0, 1), (2.0, 3), (0.5, 1), (0.01, 4)])
def test_steps_follow_from_epochs(lab, tiny_store, tmp_path, epochs, rows):
    config = lab.make_config(tiny_store, tmp_path, "steps=none", f"epochs={epochs}", f"rows.rows_per_step={rows}")
    run = check(config)
    num_tokens = int(run.reader.samples.n[run.samples("train")].sum()) + run.facts.num_train
    assert num_tokens / 128 <= run.facts.rows_per_epoch <= run.facts.num_train
    assert run.facts.steps == math.ceil(epochs * run.facts.rows_per_epoch / rows)


def test_default_rows_hold_the_longest_sample(lab, tmp_path):
    store = lab.make_store(tmp_path, longest=900, num_train=12, num_held_out=2)
    config = lab.make_config(store, tmp_path / "run", "rows.row_tokens=none", "rows.anchors=none")
    run = check(config)
    longest = int(run.reader.samples.n.max()) + 1
    assert 512 < longest <= run.facts.row_tokens < longest + 128
    assert run.facts.row_tokens % 128 == 0
    assert run.facts.anchors * 8 % 128 == 0
    assert 0 <= run.facts.anchors - run.facts.row_tokens // 8 < 16
    too_short = lab.make_config(store, tmp_path / "run", "rows.row_tokens=512")
    with pytest.raises(UserError, match=f"has {longest} tokens"):
        check(too_short)


def test_intervals_default_to_a_tenth():
    assert [interval(None, steps) for steps in (0, 1, 10, 11, 1000)] == [1, 1, 1, 2, 100]
    assert interval(7, 1000) == 7
    assert interval(1, 1000) == 1


def test_stores_that_cannot_be_trained_on(lab, tmp_path):
    with pytest.raises(UserError, match="no store at"):
        check(lab.make_config(tmp_path / "absent", tmp_path / "run"))
    filling = lab.make_store(tmp_path / "filling", num_committed=3)
    with pytest.raises(UserError, match=r"3 of \d+ segments are committed"):
        check(lab.make_config(filling, tmp_path / "run"))
    exam_only = lab.make_store(tmp_path / "exam", num_train=0)
    with pytest.raises(UserError, match=r"no committed sample to train on \(5 are held out\)"):
        check(lab.make_config(exam_only, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_folder_inside_of_the_store_is_refused(lab, tiny_store, tmp_path):
    with pytest.raises(UserError, match="lies inside of the store") as caught:
        check(lab.make_config(tiny_store, tiny_store / "runs" / "first"))
    assert len(str(caught.value).splitlines()) == 3


def test_a_mask_token_that_samples_hold_is_refused(lab, tiny_store, tmp_path):
    with pytest.raises(UserError, match=r"mask token 9 is not free: 35 of 35 samples hold it"):
        check(lab.make_config(tiny_store, tmp_path / "run", "drafter.mask_token_id=9"))
    run = check(lab.make_config(tiny_store, tmp_path / "run", "drafter.mask_token_id=58"))
    assert run.num_holding_mask == 0
    with pytest.raises(UserError, match="mask token 57 is an ordinary token of the target"):
        check(lab.make_config(tiny_store, tmp_path / "run", "drafter.mask_token_id=57"))
    assert run.mask_note() == "mask token 58"


def test_a_run_started_by_another_process_meanwhile_is_not_touched(lab, tiny_store, tmp_path, reference_run):
    run = check(lab.make_config(tiny_store, tmp_path / "run", "seed=8"))
    assert run.is_new
    shutil.copytree(reference_run, tmp_path / "run")
    with pytest.raises(UserError, match="seed was 0 and is now 8"):
        require_unchanged(run)


def test_a_folder_of_something_else_is_refused(lab, tiny_store, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match=r"holds 'metrics.jsonl' but no run.json"):
        check(lab.make_config(tiny_store, tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["a store", "its samples", "one file", "one folder", "a file"])
def test_a_new_run_mixes_with_nothing(lab, tiny_store, tmp_path, name):
    out = {"a store": tiny_store, "its samples": tiny_store.parent / "data", "a file": tmp_path / "f.txt"}.get(
        name, tmp_path / "out"
    )
    if name == "one file":
        out.mkdir()
        (out / "notes.txt").write_text("mine\n")
    elif name == "one folder":
        (out / "checkpoints").mkdir(parents=True)
    elif name == "a file":
        out.write_text("mine\n")
    before = sorted(out.rglob("*"))
    with pytest.raises(UserError, match="holds .* but no run.json|is not a folder|lies inside of the store") as caught:
        check(lab.make_config(tiny_store, out))
    assert len(str(caught.value).splitlines()) == 3
    assert sorted(out.rglob("*")) == before


def test_what_a_start_left_behind_is_no_obstacle(lab, tiny_store, tmp_path):
    (tmp_path / "kernels").mkdir()
    for name in (".lock", "train.toml", "run.json.tmp.some-host.4711"):
        (tmp_path / name).write_text("")
    assert check(lab.make_config(tiny_store, tmp_path)).is_new


def test_the_saved_config_works_from_any_folder(lab, tiny_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").symlink_to(tiny_store)
    (tmp_path / "run").mkdir()
    write_run(check(lab.make_config(Path("store"), Path("run"))))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    repeated = resolve(TrainConfig, name="train", file=tmp_path / "run" / "train.toml")
    assert not check(repeated).is_new
