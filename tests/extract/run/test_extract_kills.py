"""SIGKILL at random moments, to the launcher, a worker or a writer; the store ends as if nothing had happened."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.launch import extract
from dflash_offline.store.integrity import verify
from processes import is_alive, wait_until

MakeConfig = Callable[..., ExtractConfig]
STARTING_S = 4.0  # a launcher and its workers take about as long to load a target
LIMIT_S = 120.0


def num_commits(store: Path) -> int:
    return len(list((store / "commits").glob("[0-9]*.arrow"))) if (store / "commits").exists() else 0


class Killer:
    """Starts the same extraction again and again and kills one of its processes each time."""

    def __init__(self, start: Any, config: ExtractConfig, seed: int) -> None:
        self.start = start
        self.config = config
        self.store = Path(config.store)
        self.draw = random.Random(seed)
        self.victims: list[str] = []

    def strike(self, *, shards: int, while_writing: bool) -> bool:
        """One start and one kill; False when the run ended by itself first."""
        before = num_commits(self.store)
        run = self.start(self.config, shards=shards)
        if while_writing:
            at = before + self.draw.randrange(1, 3)
            wait_until(lambda: num_commits(self.store) >= at or run.process.poll() is not None, LIMIT_S)
            time.sleep(self.draw.uniform(0.0, 0.05))
        else:
            time.sleep(self.draw.uniform(0.0, STARTING_S))
        family = run.family()
        victim = self.draw.choice([run.process.pid, *family])
        name = family.get(victim, "launcher")
        if run.process.poll() is not None or not is_alive(victim):
            assert run.end(LIMIT_S)[0] == 0
            return False
        with suppress(ProcessLookupError):  # it may have ended by itself just now
            os.kill(victim, signal.SIGKILL)
        code, _, err = run.end(LIMIT_S)
        if code == 0:
            return False
        self.victims.append(name)
        if victim == run.process.pid:
            assert code == -signal.SIGKILL
        else:
            assert code == 1
            assert f"{name} was killed by SIGKILL" in err
            assert "are committed and safe" in err
        assert wait_until(lambda: not any(is_alive(pid) for pid in family), LIMIT_S), "a process was left behind"
        return True


def check_final(store: Path, config: ExtractConfig, whole_store: Path, content: Any) -> None:
    extract(config)
    assert not verify(store).faults
    assert content(store) == content(whole_store)


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_again_and_again(
    tmp_path: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    start_extract: Any,
    content: Any,
    count: int,
) -> None:
    """One store after another, a new one when a run ended before it could be killed, until so many kills."""
    victims: list[str] = []
    for seed in range(20, 20 + 5 * count):
        config = make_config(data, tmp_path / f"killed-{seed}")
        killer = Killer(start_extract, config, seed)
        for number in range(12):
            if len(victims) + len(killer.victims) >= count:
                break
            is_early = number < 4  # while the workers start; then behind commits
            shards = 1 if number in (5, 7, 8, 10) else 2
            if not killer.strike(shards=shards, while_writing=not is_early):
                break
        victims += killer.victims
        check_final(Path(config.store), config, whole_store, content)
        if len(victims) >= count:
            break
    assert len(victims) >= count, "too many runs ended before they could be killed"
    assert count < 12 or len({name.split()[0] for name in victims}) >= 2, "only one kind of process was killed"


@pytest.mark.parametrize("shards", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_case_c23_one_of_the_shards_dies(
    tmp_path: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    start_extract: Any,
    content: Any,
    shards: int,
) -> None:
    """Ends by itself within 60 s, names the shard, leaves no child, keeps what was done, ends equal.

    Another store where the run was done before it could be struck.
    """
    for number in range(10):
        store = tmp_path / f"store-{number}"
        config = make_config(data, store)
        run = start_extract(config, shards=shards)
        assert wait_until(lambda: num_commits(store) >= 2 or run.process.poll() is not None, LIMIT_S)  # noqa: B023
        workers, family, committed = run.workers(), run.family(), num_commits(store)
        if len(workers) < shards:
            assert run.end(LIMIT_S)[0] == 0
            continue
        victim = sorted(workers)[shards // 2]
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        code, _, err = run.end(limit_s=60.0)
        if code != 0:
            break
    else:
        pytest.fail("every run was done before it could be struck")
    assert code == 1
    assert f"{workers[victim]} was killed by SIGKILL" in err
    assert not any(is_alive(pid) for pid in workers)
    assert wait_until(lambda: not any(is_alive(pid) for pid in family), LIMIT_S), "a writer was left behind"
    kept = num_commits(store)
    told = re.search(r"in (\d+) of \d+ segments, are committed and safe", err)
    assert told is not None
    assert committed <= int(told[1]) <= kept  # the last rename of a writer may come after the count
    before = {path.name: path.stat().st_mtime_ns for path in (store / "commits").iterdir()}
    code, out, err = start_extract(config, shards=shards).end(LIMIT_S)
    assert code == 0, err
    assert f"kept: {kept} of " in err
    assert f"{kept} kept from before" in out
    after = {path.name: path.stat().st_mtime_ns for path in (store / "commits").iterdir()}
    assert before.items() <= after.items(), "a committed segment was done again"
    assert content(store) == content(whole_store)
