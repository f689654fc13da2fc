"""The loop through its public names: what it learns, resumes, refuses and reports."""

import dataclasses
import os
import shutil
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.store.files import FolderLock
from dflash_offline.store.manifest import read_manifest
from dflash_offline.train import start
from dflash_offline.train.checkpoint import list_steps, load
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.facts import read_facts
from dflash_offline.train.outcome import read_report
from dflash_offline.train.run import check_run
from dflash_offline.train.worker import train
from dflash_offline.watch import Channel


def train_inside(config: TrainConfig) -> Path:
    """The trainer in this process (its loader in one of its own); what it tells is dropped."""
    _ours, theirs = Pipe()
    start.run_trainer(Channel(theirs, "trainer"), config)
    return Path(config.out)


def check(config: TrainConfig):
    return check_run(config, lambda: "cpu")


def test_the_loop_learns(lab, tiny_store, tmp_path):
    config = lab.make_config(
        tiny_store, tmp_path / "run", "steps=30", "optim.lr=0.02", "rows.anchors=32", "eval_every=30"
    )
    report = train(config)
    losses = [line["loss"] for line in lab.metrics_of(tmp_path / "run", "train")]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    exams = lab.metrics_of(tmp_path / "run", "exam")
    assert [line["step"] for line in exams] == [0, 30]
    assert exams[1]["acceptance_length"] > exams[0]["acceptance_length"] + 0.5
    assert report is not None
    assert f"acceptance length {exams[1]['acceptance_length']:.3f} at the end" in report.text()


def test_two_runs_of_one_command_are_equal(lab, tiny_store, tmp_path, reference_run):
    run_dir = train_inside(lab.make_config(tiny_store, tmp_path / "run"))
    for step in list_steps(reference_run):
        lab.same_checkpoint(
            reference_run / "checkpoints" / f"step-{step:08d}", run_dir / f"checkpoints/step-{step:08d}"
        )


@pytest.mark.parametrize(
    "settings",
    [("optim.name=muon",), ("optim.name=adamw", "dtype=bfloat16"), ("dtype=bfloat16", "loss.weights=dpace")],
    ids=" ".join,
)
def test_a_resumed_run_equals_one_that_was_never_stopped(lab, tiny_store, tmp_path, settings):
    config = lab.make_config(tiny_store, tmp_path / "whole", *settings, "keep=9", "rows.rows_per_step=2")
    whole = train_inside(config)
    for stopped_at in (3, 8):
        resumed = shutil.copytree(whole, tmp_path / f"resumed{stopped_at}")
        (resumed / "report.json").unlink()
        for step in list_steps(resumed):
            if step > stopped_at:
                shutil.rmtree(resumed / f"checkpoints/step-{step:08d}")
        train_inside(dataclasses.replace(config, out=str(resumed)))
        for step in list_steps(whole):
            lab.same_checkpoint(resumed / f"checkpoints/step-{step:08d}", whole / f"checkpoints/step-{step:08d}")
        assert (resumed / "report.json").read_bytes() == (whole / "report.json").read_bytes()
        assert [line["loss"] for line in lab.metrics_of(resumed, "train")] == [
            line["loss"] for line in lab.metrics_of(whole, "train")
        ]


def test_exams_and_checkpoints_come_when_they_are_due(lab, reference_run):
    assert [line["step"] for line in lab.metrics_of(reference_run, "train")] == list(range(1, 13))
    assert [line["step"] for line in lab.metrics_of(reference_run, "exam")] == [0, 4, 8, 12]
    best = load(reference_run, 12).state.best_step
    assert best is not None
    assert list_steps(reference_run) == sorted({best, 9, 12})
    scores = {line["step"]: line["acceptance_length"] for line in lab.metrics_of(reference_run, "exam")[1:]}
    assert scores[best] == max(scores.values()) == load(reference_run, 12).state.best_acceptance_length


def test_a_finished_run_stays_as_it_is(lab, tiny_store, reference_run):
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in reference_run.rglob("*") if p.is_file()}
    report = train(lab.make_config(tiny_store, reference_run, "keep=1", "stall_s=301"))
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in reference_run.rglob("*") if p.is_file()}
    lock = reference_run / ".lock"
    assert {p: v for p, v in before.items() if p != lock} == {p: v for p, v in after.items() if p != lock}
    assert report is not None
    assert "is finished (12 steps); nothing was changed" in report.text()


def test_a_finished_run_that_lost_its_last_checkpoint_says_so(lab, tiny_store, tmp_path, reference_run):
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints/step-00000012")
    config = lab.make_config(tiny_store, run_dir)
    with pytest.raises(UserError, match=r"its last checkpoint is gone \(step 12\)") as caught:
        train_inside(config)
    assert len(str(caught.value).splitlines()) == 3
    (run_dir / "report.json").unlink()  # what the message advises
    train_inside(config)
    lab.same_checkpoint(run_dir / "checkpoints/step-00000012", reference_run / "checkpoints/step-00000012")


@pytest.mark.parametrize("out", ["f.txt", "f.txt/a", "/proc/no-such-folder"])
def test_a_folder_that_cannot_be_made_is_refused(lab, tiny_store, tmp_path, out):
    (tmp_path / "f.txt").write_text("mine\n")
    with pytest.raises(UserError) as caught:
        train_inside(lab.make_config(tiny_store, tmp_path / out))
    assert len(str(caught.value).splitlines()) == 3
    assert str(tmp_path / out) in caught.value.happened
    assert (tmp_path / "f.txt").read_text() == "mine\n"


def test_a_partial_run_keeps_its_snapshot(lab, tmp_path):
    store = lab.make_store(tmp_path, num_committed=9)
    config = lab.make_config(store, tmp_path / "run", "partial=true", "steps=2")
    train_inside(config)
    facts = read_facts(tmp_path / "run")
    assert facts.segments == "0-8"
    manifest = read_manifest(store)
    lab.fill_segments(store, manifest, range(9, manifest.num_segments))
    for partial in ("true", "false"):
        run = check(lab.make_config(store, tmp_path / "run", f"partial={partial}", "steps=2"))
        assert run.facts == dataclasses.replace(facts, config_digest=run.facts.config_digest)


def test_without_held_out_samples_there_is_nothing_to_measure(lab, tmp_path):
    store = lab.make_store(tmp_path, num_held_out=0)
    train_inside(lab.make_config(store, tmp_path / "run", "steps=3"))
    exams = lab.metrics_of(tmp_path / "run", "exam")
    assert [(line["step"], line["acceptance_length"], line["num_prompts"]) for line in exams] == [
        (0, None, 0),
        (3, None, 0),
    ]
    text = read_report(tmp_path / "run", "new", 0).text()
    assert "held-out exam: nothing to measure" in text
    assert f"dflash export {tmp_path / 'run'} --checkpoint latest" in text
    assert list_steps(tmp_path / "run") == [3]


def test_case_c29_one_sample_is_every_row_of_every_step(lab, tmp_path):
    """Four passes over the store in each step; the run is the one whose steps were never split by a stop."""
    store = lab.make_store(tmp_path, num_train=1, num_held_out=0)
    config = lab.make_config(store, tmp_path / "run", "steps=3", "rows.rows_per_step=4", "keep=9", "checkpoint_every=1")
    train_inside(config)
    lines = lab.metrics_of(tmp_path / "run", "train")
    assert [(line["step"], line["epoch"], line["num_samples"]) for line in lines] == [(1, 4, 4), (2, 8, 4), (3, 12, 4)]
    assert [line["num_prompts"] for line in lab.metrics_of(tmp_path / "run", "exam")] == [0, 0]
    whole = shutil.copytree(tmp_path / "run", tmp_path / "whole")
    (tmp_path / "run/report.json").unlink()
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:08d}")
    train_inside(config)
    lab.same_checkpoint(tmp_path / "run/checkpoints/step-00000003", whole / "checkpoints/step-00000003")


def test_a_run_of_no_steps_is_the_untrained_drafter(lab, tiny_store, tmp_path):
    train_inside(lab.make_config(tiny_store, tmp_path / "run", "steps=0", "seed=5"))
    loaded = load(tmp_path / "run", 0)
    fresh = Drafter(read_facts(tmp_path / "run").spec)
    fresh.init_weights(5)
    assert all(torch.equal(p, loaded.weights[n]) for n, p in fresh.named_parameters())
    assert loaded.state.best_step == 0


@pytest.mark.parametrize("name, dtype", [("muon", "float32"), ("adamw", "float32"), ("muon", "bfloat16")])
def test_one_update_moves_every_tensor(lab, tiny_store, tmp_path, name, dtype):
    """Invariant 19 of dflash-spec, through the real loop: norms included, also at a rate of 1e-4."""
    settings = ["steps=1", "optim.lr=1e-4", f"optim.name={name}", f"dtype={dtype}"]
    settings += ["optim.adamw_lr=1e-4"] if name == "muon" else []
    train_inside(lab.make_config(tiny_store, tmp_path / "run", *settings, "optim.schedule=constant"))
    after = load(tmp_path / "run", 1).weights
    before = Drafter(read_facts(tmp_path / "run").spec)
    before.init_weights(0)
    assert {n for n, _ in before.named_parameters()} == set(after)
    for tensor_name, parameter in before.to(getattr(torch, dtype)).named_parameters():
        moved = (after[tensor_name] - parameter.float()).abs()
        assert moved.max() > 2e-5, tensor_name
        if parameter.dim() == 1:
            assert (moved > 0).float().mean() > 0.9, tensor_name


def gradients_of(run_dir: Path, step: int) -> list[torch.Tensor]:
    """The gradients of an update, from AdamW's first moments where beta1 is 0 and nothing is clipped."""
    (part,) = load(run_dir, step).optimizer["parts"]
    return [part["state"][i]["exp_avg"].double() for i in sorted(part["state"])]


def test_a_step_does_not_depend_on_how_its_rows_are_split(lab, tiny_store, tmp_path):
    """Invariant 17 of dflash-spec, through the real loop: four rows at once, or one by one with fixed weights."""
    still = ["optim.name=adamw", "optim.lr=1e-30", "optim.beta1=0.0", "optim.clip=0.0", "keep=9", "checkpoint_every=1"]
    whole = train_inside(lab.make_config(tiny_store, tmp_path / "whole", *still, "steps=1", "rows.rows_per_step=4"))
    split = train_inside(lab.make_config(tiny_store, tmp_path / "split", *still, "steps=4"))
    (at_once,) = lab.metrics_of(whole, "train")
    one_by_one = lab.metrics_of(split, "train")
    weights = [line["weight"] for line in one_by_one]
    assert at_once["weight"] == pytest.approx(sum(weights), rel=1e-6)
    assert len({line["loss"] for line in one_by_one}) == 4
    assert at_once["loss"] == pytest.approx(
        sum(line["loss"] * w for line, w in zip(one_by_one, weights)) / sum(weights), rel=1e-6
    )
    for name in ("num_samples", "num_tokens", "num_blocks"):
        assert at_once[name] == sum(line[name] for line in one_by_one)
    parts = [gradients_of(split, step) for step in range(1, 5)]
    for i, gradient in enumerate(gradients_of(whole, 1)):
        expected = sum(w * part[i] for w, part in zip(weights, parts)) / sum(weights)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def test_a_second_start_is_refused_by_name(lab, tiny_store, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "LOCK_WAIT_S", 0.1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with FolderLock(run_dir), pytest.raises(UserError, match=f"{run_dir}' is in use by process {os.getpid()} on"):
        train_inside(lab.make_config(tiny_store, run_dir))
    assert [p.name for p in run_dir.iterdir()] == [".lock"]


def test_a_disk_too_small_for_a_checkpoint_loses_nothing(lab, tiny_store, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    config = lab.make_config(tiny_store, run_dir)
    answers = iter([os.statvfs(tmp_path)] * 3 + [os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))])
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: next(answers, None) or real(path))
    with pytest.raises(UserError, match="No space left on device"):
        train_inside(config)
    assert list_steps(run_dir) != [12]
    assert not (run_dir / "report.json").exists()
    monkeypatch.undo()
    train_inside(config)
    assert list_steps(run_dir)[-1] == 12


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:97", ""])
def test_a_device_that_is_not_there_is_refused(lab, tiny_store, tmp_path, device):
    with pytest.raises(UserError, match="devices? = "):
        train_inside(lab.make_config(tiny_store, tmp_path / "run", f"devices={device!r}"))
    assert not (tmp_path / "run").exists()
