"""A run that stops at a step by order and goes on later: the bits of one that never stopped."""

import json
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
from dflash_offline.train import start
from dflash_offline.train.checkpoint import list_steps, read_state
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.sinks import Sinks
from dflash_offline.train.status_line import StatusLine
from dflash_offline.train.worker import Progress, train
from dflash_offline.watch import Channel


def last_word(config: TrainConfig) -> Any:
    """The trainer in this process; the last message that it tells, None where there is none."""
    ours, theirs = Pipe()
    start.run_trainer(Channel(theirs, "trainer"), config)
    told = []
    while ours.poll():
        told.append(ours.recv()[1])
    return [message for message in told if message is not None][-1]


def numbers(lab, run_dir: Path, kind: str) -> list[dict[str, float]]:
    moment = ("rate_tflops", "mfu", "memory_peak_bytes", "rows_ready")
    lines = lab.metrics_of(run_dir, kind)
    return [{k: v for k, v in line.items() if not k.endswith("_s") and k not in moment} for line in lines]


def test_a_run_that_stopped_at_a_step_goes_on_as_if_it_had_not(lab, tiny_store, tmp_path):
    run_dir, reference_run = tmp_path / "run", tmp_path / "reference"
    last_word(lab.make_config(tiny_store, reference_run))
    for stop_at, done in ((5, 5), (5, 5), (3, 5), (7, 7)):  # again, and at a step that lies behind: nothing happens
        said = last_word(lab.make_config(tiny_store, run_dir, f"stop_at={stop_at}"))
        assert said == ("paused", {"step": done, "steps": 12})
        assert list_steps(run_dir)[-1] == done
        assert read_state(run_dir, done).exam_step == done
        assert not (run_dir / "report.json").exists()
    last_word(lab.make_config(tiny_store, run_dir, "stop_at=99"))
    name = "checkpoints/step-00000012"
    for file in ("drafter.safetensors", "optimizer.pt"):
        assert (run_dir / name / file).read_bytes() == (reference_run / name / file).read_bytes()
    assert numbers(lab, run_dir, "train") == numbers(lab, reference_run, "train")
    exams = {line["step"]: line for line in numbers(lab, run_dir, "exam")}
    assert list(exams) == [0, 4, 5, 7, 8, 12]
    assert [exams[step] for step in (0, 4, 8, 12)] == numbers(lab, reference_run, "exam")
    outcomes = [json.loads((folder / "report.json").read_text()) for folder in (run_dir, reference_run)]
    assert outcomes[0]["acceptance_length"] == outcomes[1]["acceptance_length"]


def test_the_launcher_says_where_a_run_stopped(tmp_path, capsys):
    with Progress(StatusLine(), Sinks((), tmp_path, {})) as progress:
        progress.hear("trainer", ("paused", {"step": 5, "steps": 12}))
    assert progress.is_paused
    assert "at step 5 of 12, where stop_at ends it" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_says_where_it_stopped(lab, tiny_store, tmp_path, capfd):
    assert train(lab.make_config(tiny_store, tmp_path / "run", "stop_at=1")) is None
    assert "at step 1 of 12, where stop_at ends it" in capfd.readouterr().err
