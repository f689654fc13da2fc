"""A run whose files are whole but not what it wrote: refused by name before a step is trained, never taken silently."""

import json
import shutil
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train import start
from dflash_offline.train.checkpoint import find_best, list_steps, load_drafter
from dflash_offline.train.checkpoint_check import require_place
from dflash_offline.train.facts import read_facts
from dflash_offline.train.loop_state import LoopState, Unfit
from dflash_offline.train.outcome import read_report
from dflash_offline.train.packing import pack_rows
from dflash_offline.train.report.metrics_of_run import read_run_metrics
from dflash_offline.watch import Channel
from safetensors.torch import load_file, save_file

SETTINGS = ("steps=6", "checkpoint_every=2", "eval_every=3", "optim.name=adamw")
STEP = "checkpoints/step-00000004"


def train_inside(config) -> None:
    _ours, theirs = Pipe()
    start.run_trainer(Channel(theirs, "trainer"), config)


@pytest.fixture(scope="module")
def stopped_run(lab, tiny_store, tmp_path_factory) -> Path:
    """A run of 6 steps that stands at step 4."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    train_inside(lab.make_config(tiny_store, out, *SETTINGS, "stop_at=4"))
    return out


@pytest.fixture
def run_dir(stopped_run, tmp_path) -> Path:
    return shutil.copytree(stopped_run, tmp_path / "run")


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def forget_checksums(folder: Path) -> None:
    """As an earlier version wrote it: what is wrong must be seen without them."""
    values = json.loads((folder / "state.json").read_text())
    values.pop("crc32c")
    (folder / "state.json").write_text(json.dumps(values))


def state(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "state.json", **values)


def weights(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    path = "drafter.safetensors"
    return lambda folder: save_file(change(load_file(folder / path)), folder / path)


def optimizer(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        torch.save(change(torch.load(folder / "optimizer.pt", weights_only=True)), folder / "optimizer.pt")

    return damage


def moments(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    """With the moments of the first parameter changed."""

    def changed(found: dict) -> dict:
        part = found["parts"][0]
        return {**found, "parts": [{**part, "state": {**part["state"], 0: change(part["state"][0])}}]}

    return optimizer(changed)


def without_first(found: dict) -> dict:
    return dict(sorted(found.items())[1:])


DAMAGES = {
    "shapes": (weights(lambda own: {name: v[:1].contiguous() for name, v in own.items()}), "has the shape"),
    "a missing tensor": (weights(without_first), "fc.weight is missing"),
    "a strange tensor": (weights(lambda own: own | {"zz": torch.zeros(2)}), "zz is no tensor"),
    "half numbers": (weights(lambda own: {name: v.half() for name, v in own.items()}), "float16, not torch.float32"),
    "step 2": (state(step=2), "is of step 2, the folder's name of step 4"),
    "step '4'": (state(step="4"), "has step '4'"),
    "row -1": (state(row=-1), "has row -1"),
    "row 9999": (state(row=9999), "has row 9999 of epoch 0"),
    "row 3": (state(row=3), "has row 3 of epoch 0"),
    "row 2.5": (state(row=2.5), "has row 2.5"),
    "row '1'": (state(row="1"), "has row '1'"),
    "epoch null": (state(epoch=None), "has epoch None"),
    "epoch 1": (state(epoch=1), "of epoch 1"),
    "epoch 99": (state(epoch=99), "of epoch 99"),
    "a best of text": (state(best_acceptance_length="a"), "has best_acceptance_length 'a'"),
    "a best of NaN": (state(best_acceptance_length=float("nan")), "has best_acceptance_length nan"),
    "a best to come": (state(best_step=5), "has best_step 5"),
    "an exam to come": (state(exam_step=5), "has exam_step 5"),
    "a strange key": (state(zz=1), "zz"),
    "a list as state": (lambda folder: (folder / "state.json").write_text("[]"), "TypeError"),
    "no moments": (optimizer(lambda _: {}), "has no num_steps"),
    "a list as moments": (optimizer(lambda _: []), "holds a list"),
    "parts of text": (optimizer(lambda own: own | {"parts": "ab"}), "has no parts"),
    "moments of step 3": (optimizer(lambda own: own | {"num_steps": 3}), "optimizer.pt is of step 3"),
    "other names": (optimizer(lambda own: own | {"names": own["names"][1:]}), "of other parameters"),
    "other moments": (moments(lambda own: {name: v[:1] if v.dim() else v for name, v in own.items()}), "shape"),
    "moments gone": (moments(lambda _: {}), "has no moments of the shape"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_that_is_not_the_runs_is_refused(lab, tiny_store, run_dir, name):
    damage, text = DAMAGES[name]
    forget_checksums(run_dir / STEP)
    damage(run_dir / STEP)
    with pytest.raises(UserError, match="step-00000004' cannot be read") as caught:
        train_inside(lab.make_config(tiny_store, run_dir, *SETTINGS))
    assert text in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3
    assert max(list_steps(run_dir)) == 4


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.pt", "state.json"])
def test_bits_that_are_not_those_written_are_refused(lab, tiny_store, run_dir, name):
    path = run_dir / STEP / name
    if name == "state.json":
        edit_json(path, acceptance_length=1.5)
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"\x3f" * 64 + data[len(data) // 2 + 64 :])
    with pytest.raises(UserError, match=f"step-00000004' cannot be read: .*{name}.*(crc32c|checksum)"):
        train_inside(lab.make_config(tiny_store, run_dir, *SETTINGS))
    if name != "optimizer.pt":  # which a drafter does not need
        with pytest.raises(UserError, match=f"step-00000004' cannot be read: .*{name}"):
            load_drafter(run_dir, "latest", "cpu")


def test_a_step_that_the_run_does_not_have_is_refused(lab, tiny_store, run_dir):
    folder = shutil.copytree(run_dir / STEP, run_dir / "checkpoints/step-00000009")
    readers = (
        lambda: train_inside(lab.make_config(tiny_store, run_dir, *SETTINGS)),
        lambda: load_drafter(run_dir, "latest", "cpu"),
    )
    for read in (*readers, lambda: find_best(run_dir)):
        with pytest.raises(UserError, match="step-00000009' cannot be read: state.json is of step 4"):
            read()
    forget_checksums(folder)
    edit_json(folder / "state.json", step=9, row=9)
    for read in readers:
        with pytest.raises(UserError, match="step-00000009' cannot be read: it is of step 9, and the run has 6 steps"):
            read()
    assert list_steps(run_dir)[-2:] == [4, 9]


@pytest.mark.parametrize("version", ["this", "an earlier one"])
def test_a_checkpoint_of_the_run_is_taken_to_the_same_bits(lab, tiny_store, run_dir, tmp_path, version):
    """The reference is a run that never stopped; a checkpoint without checksums gives the same."""
    if version != "this":
        forget_checksums(run_dir / STEP)
    train_inside(lab.make_config(tiny_store, run_dir, *SETTINGS))
    train_inside(lab.make_config(tiny_store, tmp_path / "whole", *SETTINGS))
    lab.same_checkpoint(run_dir / "checkpoints/step-00000006", tmp_path / "whole/checkpoints/step-00000006")
    load_drafter(run_dir, "latest", "cpu")


@pytest.mark.parametrize("rows_per_step", [1, 3])
@pytest.mark.parametrize("row_tokens", [100, 128, 300])
def test_every_place_of_a_run_passes(stopped_run, rows_per_step, row_tokens):
    """The bound on later passes holds for what `pack_rows` gives, samples of half a row and more included."""
    rng = torch.Generator().manual_seed(row_tokens)
    lengths = torch.randint(1, 101, (300,), generator=rng).numpy()
    segments = (torch.arange(300) // 10).numpy()
    packed = [pack_rows(lengths, segments, row_tokens, seed=1, epoch=e, shuffle_segments=2) for e in range(6)]
    places = [(epoch, row + 1) for epoch, rows in enumerate(packed) for row in range(len(rows))]
    own = read_facts(stopped_run)
    values = {name: getattr(own, name) for name in own.__dataclass_fields__}
    facts = type(own)(**values | {"rows_per_epoch": len(packed[0]), "rows_per_step": rows_per_step})
    require_place(LoopState(step=0, epoch=0, row=0), facts)
    for step in range(1, len(places) // rows_per_step):
        epoch, row = places[step * rows_per_step - 1]
        require_place(LoopState(step=step, epoch=epoch, row=row), facts)
        for wrong in ((epoch + 99, row), (epoch, row + 9999)):
            with pytest.raises(Unfit, match=f"row {wrong[1]} of epoch {wrong[0]}"):
                require_place(LoopState(step=step, epoch=wrong[0], row=wrong[1]), facts)


@pytest.mark.parametrize("line", ['{"step":4}', '{"step":4,"kind":"train"}', '{"step":0,"kind":"exam"}'])
def test_an_unfit_line_of_metrics_is_refused_before_training(lab, tiny_store, run_dir, line):
    path = run_dir / "metrics.jsonl"
    sound = path.read_text()
    path.write_text(sound + line + "\n")
    with pytest.raises(UserError, match=rf"line {sound.count(chr(10)) + 1} of .*metrics.jsonl' is broken"):
        train_inside(lab.make_config(tiny_store, run_dir, *SETTINGS))
    assert max(list_steps(run_dir)) == 4
    assert read_run_metrics(run_dir).num_updates >= 4, "a report shows the run all the same"


@pytest.mark.parametrize("segments", ["zz", "5-1", "-1", "1-", "1,,2", "3,1", "0-999999999999", " 1", "1-2-3"])
def test_segments_that_no_run_has_are_refused(lab, tiny_store, run_dir, segments):
    edit_json(run_dir / "run.json", segments=segments)
    with pytest.raises(UserError, match="run.json' is broken: .*segments") as caught:
        train_inside(lab.make_config(tiny_store, run_dir, *SETTINGS))
    assert segments in caught.value.happened


REPORTS = ["[]", "{}", "null", "5", '"a"', '{"steps": 1}', "[" * 100_000]
CHANGES = [
    {"steps": "6"},
    {"epochs": None},
    {"loss": "a"},
    {"acceptance_length": "a"},
    {"acceptance_length_untrained": None},
    {"best_step": None},
    {"num_prompts": None},
    {"origin": 3},
]


@pytest.mark.parametrize("change", [*REPORTS, *CHANGES], ids=lambda change: str(change)[:40])
def test_an_unfit_report_is_named(reference_run, tmp_path, change):
    path = shutil.copytree(reference_run, tmp_path / "run") / "report.json"
    if isinstance(change, str):
        path.write_text(change)
    else:
        edit_json(path, **change)
    with pytest.raises(UserError, match="report.json' is broken: ") as caught:
        read_report(tmp_path / "run", "finished", 0)
    assert len(str(caught.value).splitlines()) == 3
    assert "remove it, and give the same command again" in caught.value.advice


def test_a_removed_report_is_written_again(lab, tiny_store, reference_run, tmp_path):
    """What the message advises."""
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    (run_dir / "report.json").unlink()
    train_inside(lab.make_config(tiny_store, run_dir))
    assert (run_dir / "report.json").read_bytes() == (reference_run / "report.json").read_bytes()


@pytest.mark.parametrize("kind", ["measured", "of an earlier version", "nothing to measure"])
def test_a_sound_report_is_told(reference_run, tmp_path, kind):
    path = shutil.copytree(reference_run, tmp_path / "run") / "report.json"
    if kind == "of an earlier version":
        values = json.loads(path.read_text())
        del values["origin"]
        path.write_text(json.dumps(values))
    elif kind == "nothing to measure":
        names = ("acceptance_length", "acceptance_length_untrained", "best_acceptance_length", "best_step", "loss")
        edit_json(path, **dict.fromkeys(names), num_prompts=0)
    for begun in ("new", "resumed", "finished"):
        assert "next: dflash evaluate" in read_report(tmp_path / "run", begun, 3).text()
