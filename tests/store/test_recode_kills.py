"""SIGKILL at random moments, to the launcher or a worker of `recode`; the new store ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dflash_offline.store.config import RecodeConfig
from dflash_offline.store.integrity import verify
from dflash_offline.store.recode import recode
from processes import children, is_alive, wait_until

SETTINGS = {"codec": "int8:4", "taps": (17, 1), "segment_positions": 512}
NUM_SAMPLES = 90
LAYOUT_S = 0.3  # from a launcher's folder to its first worker
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def halves(lab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two stores that become one, with some samples in both."""
    folder = tmp_path_factory.mktemp("halves")
    numbers = (range(NUM_SAMPLES // 2), range(NUM_SAMPLES // 2 - 5, NUM_SAMPLES))
    return [str(lab.make_store(folder / f"half{k}", own)) for k, own in enumerate(numbers)]


@pytest.fixture(scope="module")
def undisturbed(halves: list[str], lab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file of the new store, made in one go."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    report = recode(RecodeConfig(out=str(out), workers=1, **SETTINGS), halves)
    assert (report.num_samples, report.left_out) == (NUM_SAMPLES, {"in an earlier store too": 5})
    assert report.num_segments >= 20
    return lab.small.tree(out)


class Killer:
    """Starts the same recode again and again and kills one of its processes each time."""

    def __init__(self, stores: list[str], out: Path, seed: int) -> None:
        self.stores = stores
        self.out = out
        self.draw = random.Random(seed)
        self.victims: list[str] = []
        self.run: subprocess.Popen[str] | None = None

    def start(self, workers: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "dflash_offline.cli", "recode", *self.stores, "--out", str(self.out)]
        command += ["--codec", "int8:4", "--taps", "17,1", "--set", "segment_positions=512", "--workers", str(workers)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.run = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, **pipes)
        return self.run

    def num_commits(self) -> int:
        return len(list((self.out / "commits").glob("[0-9]*.arrow"))) if (self.out / "commits").exists() else 0

    def strike(self, *, workers: int, while_writing: bool, is_worker: bool) -> bool:
        """One start and one kill, of a worker or of any process; False when the run ended by itself first."""
        at = self.num_commits() + self.draw.randrange(1, 3)
        run = self.start(workers)
        if while_writing:
            wait_until(lambda: self.num_commits() >= at or run.poll() is not None, LIMIT_S)
            time.sleep(self.draw.uniform(0.0, 0.02))
        elif is_worker:
            wait_until(lambda: children(run.pid, "worker") or run.poll() is not None, LIMIT_S)
        else:
            wait_until(lambda: self.out.exists() or run.poll() is not None, LIMIT_S)
            time.sleep(self.draw.uniform(0.0, LAYOUT_S))
        family = children(run.pid, "worker")
        victim = self.draw.choice([*family] if is_worker and family else [run.pid, *family])
        if run.poll() is not None or not is_alive(victim):
            assert run.communicate(timeout=LIMIT_S) is not None
            return False
        with suppress(ProcessLookupError):  # it may have ended by itself just now
            os.kill(victim, signal.SIGKILL)
        _, err = run.communicate(timeout=LIMIT_S)
        if run.returncode == 0:
            return False
        self.victims.append(family.get(victim, "launcher"))
        if victim == run.pid:
            assert run.returncode == -signal.SIGKILL
        else:
            assert run.returncode == 1
            assert f"{family[victim]} was killed by SIGKILL" in err
            assert "are committed and safe" in err
        assert wait_until(lambda: not any(is_alive(pid) for pid in family), LIMIT_S), "a process was left behind"
        return True


@pytest.fixture
def make_killer(halves: list[str]) -> Iterator[Callable[[Path, int], Killer]]:
    """make_killer(out, seed); what a failed test leaves alive is killed after it."""
    killers: list[Killer] = []

    def make(out: Path, seed: int) -> Killer:
        killers.append(Killer(halves, out, seed))
        return killers[-1]

    yield make
    for killer in killers:
        if killer.run is not None and killer.run.poll() is None:
            killer.run.kill()
            killer.run.communicate()


def check_final(out: Path, halves: list[str], lab: ModuleType, undisturbed: dict[str, bytes]) -> None:
    recode(RecodeConfig(out=str(out), workers=2, **SETTINGS), halves)
    found = lab.small.tree(out)
    assert sorted(name for name in {*found, *undisturbed} if found.get(name) != undisturbed.get(name)) == []
    assert not verify(out).faults


def kill_until(count: int, root: Path, make_killer: Any, finish: Callable[[Path], None]) -> None:
    """Strikes at one store after another, a new one when a run ended by itself, until so many kills of both kinds."""
    victims: list[str] = []
    for seed in range(10 * count):
        killer = make_killer(root / f"out-{seed}", seed)
        for number in range(10):
            if is_enough(victims + killer.victims, count):
                break
            is_early = number < 3  # while the store is laid out; then behind commits
            if not killer.strike(workers=1 + number % 3, while_writing=not is_early, is_worker=number % 2 == 1):
                break
        victims += killer.victims
        finish(root / f"out-{seed}")
        if is_enough(victims, count):
            return
    raise AssertionError(f"{victims} of {count} kills: runs ended before they could be killed")


def is_enough(victims: list[str], count: int) -> bool:
    """So many kills, launchers and workers among them."""
    return len(victims) >= count and len({name.split()[0] for name in victims}) == 2


@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_again_and_again(
    tmp_path: Path, halves: list[str], lab: ModuleType, undisturbed: dict[str, bytes], make_killer: Any, count: int
) -> None:
    kill_until(count, tmp_path, make_killer, lambda out: check_final(out, halves, lab, undisturbed))


def test_a_layout_cut_off_after_each_of_its_files_is_completed(
    tmp_path: Path, halves: list[str], lab: ModuleType
) -> None:
    """The files that are there before the first worker starts, and the folder of tokens that a kill leaves."""
    out = tmp_path / "out"
    config = RecodeConfig(out=str(out), workers=1, limit=8, **SETTINGS)
    recode(config, halves)
    expected = lab.small.tree(out)
    laid_out = ["zarr.json", "hidden/zarr.json", "last/zarr.json", "plan/tokens-00000.arrow", "plan/index.arrow"]
    laid_out += ["frozen/frozen.safetensors", "frozen/config.json"]
    assert set(laid_out) <= set(expected)
    for count in range(1, len(laid_out) + 1):
        for name in set(expected) - set(laid_out[:count]):
            (out / name).unlink()
        (out / ".tokens").mkdir()
        (out / ".tokens" / "tokens-00007.arrow").write_bytes(b"of another start")
        recode(config, halves)
        assert lab.small.tree(out) == expected
