"""Several processes do what one does, byte for byte, and a process that dies ends the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.lines.inputs import chunks
from dflash_offline.extract.pool import LATER, WANTS_WORK, Deal, Done, num_processes
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import LINE, NOTE, TURN, count_rejected
from processes import children, wait_until

NUM_LINES = 6000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, write_lines: Any, chat: Any) -> Path:
    """Chats of very different lengths, some bad, some twice, some with an empty answer: several chunks."""
    path = tmp_path_factory.mktemp("chats") / "in.jsonl"
    lines: list[Any] = []
    for i in range(NUM_LINES):
        words = f"answer {i} " * (1 + i * i % 97)
        second = words[::-1] if i % 7 else ""
        lines.append({"messages": chat(f"question {i % 5000}", words, "and more?", second)} if i % 50 else {"x": i})
    write_lines(path, lines)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_bytes_whatever_the_number_of_processes(source: Path, tmp_path: Path, case_target: Any) -> None:
    made = []
    for processes in (1, 2, 3):
        config = PrepareConfig(target=str(case_target()), out=str(tmp_path / str(processes)), processes=processes)
        prepare(config, [str(source)])
        made.append(contents(tmp_path / str(processes)))
    assert len(list(chunks(source))) > 3, "more chunks than processes"
    assert made[0] == made[1] == made[2]
    assert set(count_rejected(tmp_path / "1")) == {LINE, TURN, NOTE}
    assert {"data.json", "rejected.parquet", "tokens-00000.arrow"} == set(made[0])


def test_what_a_worker_raises_is_raised_and_nothing_is_left(source: Path, tmp_path: Path, case_target: Any) -> None:
    target = str(case_target())
    out = str(tmp_path / "data")
    with pytest.raises(UserError, match="line 1 of in.jsonl cannot be used: unknown shape"):
        prepare(PrepareConfig(target=target, out=out, processes=2, strict=True), [str(source)])
    with pytest.raises(UserError, match=r"template.tools"):  # found by the workers, at their first chat
        prepare(PrepareConfig(target=target, out=out, processes=2, template={"tools": 1}), [str(source)])
    assert not list(tmp_path.iterdir())


def test_a_killed_worker_ends_the_run(source: Path, tmp_path: Path, case_target: Any) -> None:
    line = ["prepare", str(source), "--target", str(case_target()), "--out", str(tmp_path / "data")]
    command = [sys.executable, "-m", "dflash_offline.cli", *line, "--set", "processes=2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        os.kill(first_worker(running.pid), signal.SIGKILL)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert "killed by SIGKILL" in err
    assert "give the same command again: it starts over" in err
    assert not list(tmp_path.iterdir())


def first_worker(pid: int) -> int:
    """Its first worker, when there is one; the limit is the test's, not the command's."""
    found: dict[int, str] = {}
    assert wait_until(lambda: found.update(children(pid, "prepare")) or found, 120.0), "no worker appeared"
    return min(found)


def test_outcomes_are_taken_in_order_and_memory_is_bounded(source: Path) -> None:
    """A worker that is slow with the first chunk holds the others up, after a few of theirs."""
    taken: list[Any] = []
    deal = Deal(chunks(source), 3, lambda path, outcomes: taken.append(outcomes))
    numbers = [deal.answer("a", WANTS_WORK)[0] for _ in range(3)]  # type: ignore[index]
    assert numbers == [0, 1, 2]
    assert deal.answer("a", WANTS_WORK) == LATER
    marks: list[Any] = [["zero"], ["one"], ["two"]]
    for number in (2, 1):
        deal.answer("b", Done(number, marks[number]))
        assert taken == []
        assert deal.answer("b", WANTS_WORK) == LATER
    deal.answer("a", Done(0, marks[0]))
    assert taken == marks
    assert deal.answer("a", WANTS_WORK)[0] == 3  # type: ignore[index]


def test_small_inputs_are_worth_one_process(source: Path, tmp_path: Path) -> None:
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(2**40)
    assert num_processes(PrepareConfig(), [source]) == 1
    assert num_processes(PrepareConfig(), [large]) == min(32, len(os.sched_getaffinity(0)))
    assert num_processes(PrepareConfig(processes=7), [source]) == 7
