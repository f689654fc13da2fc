"""Killed, torn, interrupted or changed: the same command goes on, and nothing is lost or done twice."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.regenerate.config import RegenerateConfig
from dflash_offline.extract.regenerate.run import regenerate
from dflash_offline.store.files import FolderLock

Config = Callable[..., RegenerateConfig]
Questions = Callable[..., str]
FILES = ("responses.jsonl", "left-out.jsonl", "regenerate.json")
LIMIT_S = 120.0
NUM_LINES = 80
CONCURRENCY = 4


def contents(folder: str | Path) -> list[bytes]:
    return [(Path(folder) / name).read_bytes() for name in FILES]


def mixed_lines() -> list[Any]:
    """Chats of one to three turns, with some lines that fail and some that are none."""
    lines: list[Any] = []
    for number in range(NUM_LINES):
        chat = [{"role": "user", "content": f"question {number}"}]
        for turn in range(number % 3):
            chat += [{"role": "assistant", "content": "old"}, {"role": "user", "content": f"and {turn}?"}]
        lines.append({"odd": number} if number % 17 == 5 else chat)
    return lines


def refuses_some(body: dict[str, Any], tries: int, replies: types.SimpleNamespace) -> Any:
    said = body["messages"][0]["content"]
    return replies.error(400, "no") if said.endswith("9") else replies.sensible(body, tries)


class Killer:
    """Starts the command as a process of its own, and kills it at its N-th request, or shortly after."""

    def __init__(self, server: Any, replies: types.SimpleNamespace, chats: str, out: Path) -> None:
        self.server = server
        self.replies = replies
        options = ["--endpoint", server.url, "--out", str(out), "--concurrency", str(CONCURRENCY)]
        self.command = [sys.executable, "-m", "dflash_offline.cli", "regenerate", chats, *options]
        self.process: subprocess.Popen[str] | None = None
        self.left = 0
        self.delay_s = 0.0
        self.signal = signal.SIGKILL
        server.behave = self.behave

    async def behave(self, body: dict[str, Any], tries: int) -> Any:
        self.left -= 1
        if self.left == 0 and self.process is not None:
            asyncio.get_running_loop().call_later(self.delay_s, os.kill, self.process.pid, self.signal)
        return refuses_some(body, tries, self.replies)

    def run(self, at: int, delay_s: float) -> tuple[int, str]:
        """Exit code and stderr of one start, killed `delay_s` after its request number `at` (0: never)."""
        self.left, self.delay_s, self.process = at, delay_s, None
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            _, err = self.process.communicate(timeout=LIMIT_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        return self.process.returncode, err


@pytest.fixture
def expected(config: Config, questions: Questions, server: Any, replies: types.SimpleNamespace) -> list[bytes]:
    """What an uninterrupted run writes."""
    server.behave = lambda body, tries: refuses_some(body, tries, replies)
    out = config().out + "-uninterrupted"
    report = regenerate(config(out=out, concurrency=CONCURRENCY), [questions(*mixed_lines())])
    assert report.counts["lines_in"] == NUM_LINES
    assert min(report.counts[name] for name in ("answered", "failed", "skipped")) >= 4
    server.bodies.clear()
    return contents(out)


@pytest.mark.parametrize("num_kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(
    num_kills: int,
    expected: list[bytes],
    questions: Questions,
    server: Any,
    replies: types.SimpleNamespace,
    tmp_path: Path,
) -> None:
    draw = random.Random(num_kills)
    killer = Killer(server, replies, questions(*mixed_lines()), tmp_path / "out")
    kills = 0
    for _ in range(3 * num_kills):
        # At most 60 requests at a time for few kills, 6 for many, so that the run does not end before them.
        code, err = killer.run(draw.randrange(1, 240 // num_kills), draw.choice([0.0, draw.uniform(0, 0.02)]))
        assert code in (0, -signal.SIGKILL), err
        kills += code != 0
        if kills == num_kills:
            break
        if code == 0:
            assert contents(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
    assert kills == num_kills
    assert killer.run(0, 0.0)[0] == 0
    assert contents(tmp_path / "out") == expected


def test_a_torn_journal_costs_only_the_lines_that_are_torn(
    expected: list[bytes], config: Config, questions: Questions, server: Any, tmp_path: Path
) -> None:
    chats = questions(*mixed_lines())
    whole = (Path(config().out + "-uninterrupted") / "journal.log").read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    draw = random.Random(1)
    sizes = [*draw.sample(range(len(whole)), 20), *(draw.choice(ends) + shift for shift in (-1, 0, 1)), len(whole)]
    for size in sizes:
        out = tmp_path / f"torn-{size}"
        out.mkdir()
        (out / "journal.log").write_bytes(whole[:size])
        server.bodies.clear()
        regenerate(config(out=str(out), concurrency=CONCURRENCY), [chats])
        assert contents(out) == expected, size
        lost = NUM_LINES - max(0, sum(end <= size for end in ends) - 1)
        assert (len(server.bodies) == 0) == (lost == 0)
        assert len(server.bodies) <= 3 * lost


def test_a_damaged_record_costs_the_lines_that_it_may_hold(
    expected: list[bytes], config: Config, questions: Questions, server: Any, tmp_path: Path
) -> None:
    """Its own line, and those that failed before it; all others stay, and each line is there once in the end."""
    chats = questions(*mixed_lines())
    whole = (Path(config().out + "-uninterrupted") / "journal.log").read_bytes()
    lines = whole.splitlines(keepends=True)
    draw = random.Random(2)
    for number in [1, *draw.sample(range(2, len(lines) - 1), 5)]:
        out = tmp_path / f"damaged-{number}"
        out.mkdir()
        place = sum(map(len, lines[:number])) + draw.randrange(len(lines[number]) - 1)
        (out / "journal.log").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        server.bodies.clear()
        regenerate(config(out=str(out), concurrency=CONCURRENCY), [chats])
        assert contents(out) == expected, number
        num_failed = sum(line.split(b" ", 4)[3] == b"failed" for line in lines[1:number])
        assert len(server.bodies) <= 3 + num_failed
        after = (out / "journal.log").read_bytes()
        assert after.startswith(whole[:place])
        assert after.count(b"\n") <= len(lines) + 2 + num_failed
        assert not regenerate(config(out=str(out), concurrency=CONCURRENCY), [chats]).is_new


def test_a_damaged_beginning_wipes_nothing(
    expected: list[bytes], config: Config, questions: Questions, server: Any, tmp_path: Path
) -> None:
    whole = (Path(config().out + "-uninterrupted") / "journal.log").read_bytes()
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "journal.log"
    path.write_bytes(broken := whole[:30] + b"~" + whole[31:])
    with pytest.raises(UserError, match="its first record does not hold the facts"):
        regenerate(config(concurrency=CONCURRENCY), [questions(*mixed_lines())])
    assert path.read_bytes() == broken
    assert server.bodies == []
    path.write_bytes(whole)
    regenerate(config(concurrency=CONCURRENCY), [questions(*mixed_lines())])
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("there", [[], ["responses.jsonl"], ["responses.jsonl", "left-out.jsonl"]])
def test_killed_while_the_folder_was_finished(
    there: list[str], expected: list[bytes], config: Config, questions: Questions, server: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(config().out + "-uninterrupted", out)
    for name in set(FILES) - set(there):
        (out / name).unlink()
    (out / "left-out.jsonl.tmp.host.1").write_text("half a li")
    regenerate(config(concurrency=CONCURRENCY), [questions(*mixed_lines())])
    assert contents(out) == expected
    assert server.bodies == []
    assert {path.name for path in out.iterdir()} == {*FILES, "journal.log", ".lock"}


def test_ctrl_c_leaves_the_journal_whole(
    expected: list[bytes], questions: Questions, server: Any, replies: types.SimpleNamespace, tmp_path: Path
) -> None:
    killer = Killer(server, replies, questions(*mixed_lines()), tmp_path / "out")
    killer.signal = signal.SIGINT
    code, err = killer.run(40, 0.0)
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    journal = (tmp_path / "out" / "journal.log").read_bytes()
    assert journal.endswith(b"\n")
    assert journal.count(b"\n") >= 10
    killer.signal = signal.SIGKILL
    assert killer.run(0, 0.0)[0] == 0
    assert contents(tmp_path / "out") == expected


def test_a_finished_folder_needs_no_server(
    expected: list[bytes], config: Config, questions: Questions, server: Any
) -> None:
    server.stop()
    out = config().out + "-uninterrupted"
    report = regenerate(config(out=out), [questions(*mixed_lines())])
    assert not report.is_new
    assert "complete already, nothing changed" in report.text()
    assert contents(out) == expected


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(
    "changes, named",
    [
        ({"temperature": 0.0}, ["origin", "'target T=0.7'", "'target greedy'"]),
        ({"max_new_tokens": 7}, ["sampling.max_new_tokens", "2048", "7"]),
        ({"seed": 1}, ["sampling.seed", "0", "1"]),
        ({"top_k": 5}, ["sampling.top_k", "None", "5"]),
        ({"model": "large"}, ["model", "'small'", "'large'"]),
        ({"template": {"enable_thinking": True}}, ["template.enable_thinking", "None", "True"]),
        ({"extra": {"min_p": 0.1}}, ["extra.min_p", "None", "0.1"]),
        ({"limit": 3}, ["limit", "None", "3"]),
    ],
)
def test_changed_settings_are_refused_with_both_values(
    is_finished: bool, changes: dict[str, Any], named: list[str], config: Config, questions: Questions, tmp_path: Path
) -> None:
    chats = questions("a", "b")
    regenerate(config(temperature=0.7), [chats])
    if not is_finished:
        (tmp_path / "out" / "regenerate.json").unlink()
    before = (tmp_path / "out" / "journal.log").read_bytes()
    with pytest.raises(UserError, match="was begun with") as error:
        regenerate(config(**{"temperature": 0.7} | changes), [chats])
    assert all(text in error.value.happened for text in named), error.value.happened
    assert (tmp_path / "out" / "journal.log").read_bytes() == before


def test_changed_inputs_are_refused(config: Config, questions: Questions) -> None:
    regenerate(config(), [questions("a", "b")])
    with pytest.raises(UserError, match=r"sources\[0\].sha256"):
        regenerate(config(), [questions("a", "c")])
    with pytest.raises(UserError, match="sources"):
        regenerate(config(), [questions("a", "b"), questions("d", name="more.jsonl")])


def test_places_and_patience_may_change(config: Config, questions: Questions, make_server: Any, tmp_path: Path) -> None:
    chats = questions("a", "b")
    regenerate(config(), [chats])
    (tmp_path / "out" / "regenerate.json").unlink()
    other = make_server()
    changed = config(endpoint=(other.url,), concurrency=3, attempts=2, request_s=9.0, give_up_s=9.0)
    assert regenerate(changed, [chats]).counts["answered"] == 2


def test_failed_lines_are_tried_again_when_asked_for(
    config: Config, questions: Questions, server: Any, replies: types.SimpleNamespace, tmp_path: Path
) -> None:
    chats = questions("a", "bad", "c")
    server.behave = lambda body, tries: (
        replies.error(400, "no") if body["messages"][0]["content"] == "bad" else replies.sensible(body, tries)
    )
    first = regenerate(config(), [chats])
    assert "--retry-failed" in first.text()
    server.bodies.clear()
    assert not regenerate(config(), [chats]).is_new
    assert server.bodies == []

    server.behave = replies.sensible
    second = regenerate(config(retry_failed=True), [chats])
    assert [body["messages"][0]["content"] for body in server.bodies] == ["bad"]
    assert (second.counts["answered"], second.counts["failed"]) == (3, 0)
    regenerate(config(out=str(tmp_path / "fresh")), [chats])
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert not regenerate(config(retry_failed=True), [chats]).is_new, "no line is left that failed"


def test_a_retry_that_is_killed_keeps_what_was_answered(
    config: Config, questions: Questions, server: Any, replies: types.SimpleNamespace, tmp_path: Path
) -> None:
    """The old files stand until the new ones are written; a plain command finds them complete."""
    chats = questions("a", "bad", "worse")
    server.behave = lambda body, tries: (
        replies.sensible(body, tries) if body["messages"][0]["content"] == "a" else replies.error(400, "no")
    )
    regenerate(config(), [chats])
    before = contents(tmp_path / "out")
    server.behave = lambda body, tries: replies.error(401, "gone")
    with pytest.raises(UserError, match="401"):
        regenerate(config(retry_failed=True), [chats])
    assert contents(tmp_path / "out") == before
    assert not regenerate(config(), [chats]).is_new


def test_without_its_journal_nothing_can_be_tried_again(
    config: Config, questions: Questions, server: Any, replies: types.SimpleNamespace, tmp_path: Path
) -> None:
    server.behave = lambda body, tries: (
        replies.error(400, "no") if body["messages"][0]["content"] == "bad" else replies.sensible(body, tries)
    )
    chats = questions("a", "bad")
    regenerate(config(), [chats])
    (tmp_path / "out" / "journal.log").unlink()
    assert not regenerate(config(), [chats]).is_new
    with pytest.raises(UserError, match=r"journal.log.* is gone"):
        regenerate(config(retry_failed=True), [chats])


def test_one_run_at_a_time(config: Config, questions: Questions, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FolderLock(tmp_path / "out"), pytest.raises(UserError, match="is in use by process"):
        regenerate(config(), [questions("a")])


def test_a_journal_that_cannot_grow_stops_the_run_and_the_next_goes_on(
    expected: list[bytes], questions: Questions, server: Any, replies: types.SimpleNamespace, tmp_path: Path
) -> None:
    """Files may have 8 KiB at first: a record is cut in the middle, as on a full disk."""
    killer = Killer(server, replies, questions(*mixed_lines()), tmp_path / "out")
    command = killer.command
    killer.command = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command]
    code, err = killer.run(0, 0.0)
    assert code == 1
    assert "journal.log' failed: File too large" in err
    assert "every line answered before stays safe" in err
    assert (tmp_path / "out" / "journal.log").stat().st_size == 8192
    killer.command = command
    code, err = killer.run(0, 0.0)
    assert code == 0, err
    assert "of a record that was not finished are cut off" in err
    assert contents(tmp_path / "out") == expected
