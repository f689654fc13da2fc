"""Checkpoints that are written while the loop goes on."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.checkpoint import LoopState, list_steps, load, remove_temporaries, save
from dflash_offline.train.checkpoint_writer import CheckpointWriter, on_host
from dflash_offline.watch import BEAT_S, Stalled


def opened(run_dir: Path, stall_s: float = 30.0) -> CheckpointWriter:
    return CheckpointWriter(run_dir, keep=2, stall_s=stall_s, beat=lambda: None)


def state_of(step: int) -> LoopState:
    return LoopState(step=step, epoch=0, row=step)


def optimizer_of(value: torch.Tensor) -> dict:
    return {"parts": [{"state": {0: {"moment": value}}, "param_groups": [{"betas": (0.9, 0.95)}]}], "names": ["a"]}


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk whose free space is not known before the event is set."""
    real, answered = os.statvfs, threading.Event()

    def statvfs(path):
        assert answered.wait(30.0)
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    try:
        yield answered
    finally:
        answered.set()


def test_a_checkpoint_holds_the_moment_at_which_it_was_asked_for(tmp_path, monkeypatch):
    weights, moment = {"a": torch.zeros(4)}, torch.zeros(3)
    with slow_disk(monkeypatch) as answered, opened(tmp_path) as writer:
        writer.write(state_of(3), weights, optimizer_of(moment))
        weights["a"] += 1.0  # the next update, while nothing is on the disk yet
        moment += 1.0
        writer.check()
        assert list_steps(tmp_path) == []
        answered.set()
    assert list_steps(tmp_path) == [3]
    loaded = load(tmp_path, 3)
    assert torch.equal(loaded.weights["a"], torch.zeros(4))
    assert torch.equal(loaded.optimizer["parts"][0]["state"][0]["moment"], torch.zeros(3))
    assert loaded.optimizer["parts"][0]["param_groups"] == [{"betas": (0.9, 0.95)}]


def test_the_next_waits_for_the_one_under_way(tmp_path, monkeypatch):
    with slow_disk(monkeypatch) as answered, opened(tmp_path) as writer:
        writer.write(state_of(1), {"a": torch.zeros(1)}, {})
        threading.Timer(0.5, answered.set).start()
        writer.write(state_of(2), {"a": torch.zeros(1)}, {})
        assert 1 in list_steps(tmp_path)
        writer.write(state_of(3), {"a": torch.zeros(1)}, {})
    assert list_steps(tmp_path) == [2, 3], "pruned as before"


def test_a_write_that_hangs_is_named(tmp_path, monkeypatch):
    expected = pytest.raises(Stalled, match="the trainer waited for checkpoint 7 to be written")
    with slow_disk(monkeypatch), expected, opened(tmp_path, stall_s=0.5) as writer:
        writer.write(state_of(7), {"a": torch.zeros(1)}, {})


def test_a_write_that_fails_ends_the_run_and_leaves_the_one_before(tmp_path):
    giant = {"a": torch.zeros(1)}
    with pytest.raises(UserError, match="step-00000002' failed"), opened(tmp_path) as writer:
        writer.write(state_of(1), giant, {})
        writer.wait()
        (tmp_path / "checkpoints").rename(tmp_path / "kept")
        (tmp_path / "checkpoints").write_text("a file")
        writer.write(state_of(2), giant, {})
        while writer.under_way is not None:
            writer.under_way.thread.join(0.01)
            writer.check()
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "kept").rename(tmp_path / "checkpoints")
    assert list_steps(tmp_path) == [1]


def test_an_error_elsewhere_lets_the_write_under_way_finish(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="elsewhere"), slow_disk(monkeypatch) as answered, opened(tmp_path) as writer:
        writer.write(state_of(4), {"a": torch.zeros(1)}, {})
        threading.Timer(0.3, answered.set).start()
        raise ValueError("elsewhere")
    assert list_steps(tmp_path) == [4]


def test_the_state_of_a_checkpoint_is_renewed_alone(tmp_path):
    """As after an exam that was held when the run went on."""
    save(tmp_path, state_of(4), {"a": torch.ones(2)}, {"n": 1})
    before = {p.name: p.stat().st_ino for p in (tmp_path / "checkpoints/step-00000004").iterdir()}
    save(tmp_path, LoopState(step=4, epoch=0, row=4, exam_step=4), {"a": torch.ones(2)}, {"n": 1})
    assert load(tmp_path, 4).state.exam_step == 4
    after = {p.name: p.stat().st_ino for p in (tmp_path / "checkpoints/step-00000004").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"state.json"}
    left = tmp_path / "checkpoints/step-00000004/state.json.tmp.host.77"
    left.write_text("{")
    assert remove_temporaries(tmp_path) == [left]


def test_copies_keep_their_types():
    value = {"a": [torch.ones(1), (1, torch.zeros(2))], "b": None}
    copied = on_host(value)
    assert type(copied["a"][1]) is tuple
    assert copied["b"] is None
    assert copied["a"][0].data_ptr() != value["a"][0].data_ptr()


def test_a_loop_that_ends_by_an_error_shows_signs_of_life_while_the_write_finishes(tmp_path, monkeypatch):
    """Else its launcher would take the silence for the fault. Here the disk answers at the first of them."""
    with slow_disk(monkeypatch) as answered:
        writer = CheckpointWriter(tmp_path, keep=2, stall_s=10.0, beat=answered.set)
        with pytest.raises(ValueError, match="elsewhere"), writer:
            writer.write(state_of(4), {"a": torch.zeros(1)}, {})
            raise ValueError("elsewhere")
        assert list_steps(tmp_path) == [4]


def test_a_write_that_had_its_time_is_not_waited_for_again(tmp_path, monkeypatch):
    """The launcher must hear which checkpoint hangs before it finds the trainer silent."""
    waits: list[float] = []
    with slow_disk(monkeypatch), pytest.raises(Stalled), opened(tmp_path, stall_s=0.5) as writer:
        writer.write(state_of(7), {"a": torch.zeros(1)}, {})
        assert writer.under_way is not None
        join = writer.under_way.thread.join
        monkeypatch.setattr(writer.under_way.thread, "join", lambda limit: (waits.append(limit), join(limit)))
        writer.wait()
    assert set(waits) <= {BEAT_S}
