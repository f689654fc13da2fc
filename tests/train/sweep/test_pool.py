"""Children on devices: one at a time on each; one that fails, dies or is silent ends no other, and none is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from dflash_offline import UserError
from dflash_offline.train.sweep.pool import run_pool
from dflash_offline.watch import ChildDied, Job, Stalled
from processes import is_alive, wait_until

LIMIT_S = 300.0


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import pool_children  # pyright: ignore[reportMissingImports]

    return pool_children


def test_each_device_has_one_job_at_a_time(pool):
    work = pool.Jobs(*(Job(f"job {i}", pool.work, (str(i),)) for i in range(6)))
    run_pool(work, ["a", "b"], stall_s=LIMIT_S, leave_s=1.0)
    assert work.ends == {f"job {i}": None for i in range(6)}
    assert set(work.devices.values()) == {"a", "b"}
    for device in ("a", "b"):
        kinds = [kind for name, (kind, _) in work.heard if work.devices[name] == device]
        assert kinds == ["begins", "ends"] * (len(kinds) // 2)


def test_whatever_ends_one_leaves_the_others(pool):
    work = pool.Jobs(Job("refuse", pool.refuse), Job("die", pool.die), Job("work", pool.work, ("x",)))
    run_pool(work, ["a", "b"], stall_s=LIMIT_S, leave_s=1.0)
    ends = {name: type(error) for name, error in work.ends.items()}
    assert ends == {"refuse": UserError, "die": ChildDied, "work": type(None)}
    assert "the disk is full" in str(work.ends["refuse"])


def test_one_that_is_silent_is_ended_with_its_stacks(pool, capfd):
    work = pool.Jobs(Job("hang", pool.hang))
    run_pool(work, ["a"], stall_s=1.0, leave_s=1.0)
    assert isinstance(work.ends["hang"], Stalled)
    assert "stacks of hang" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_the_launcher(pool, tmp_path, number):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", "import sys, pool_children as p; p.launch(sys.argv[1])", str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    files = [tmp_path / f"{name}.pid" for name in ("one", "two")]
    assert wait_until(lambda: all(path.exists() and path.read_text() for path in files), LIMIT_S)
    process.send_signal(number)
    process.wait(timeout=LIMIT_S)
    pids = [int(path.read_text()) for path in files]
    assert wait_until(lambda: not any(map(is_alive, pids)), LIMIT_S)
    has_left = [(tmp_path / name).exists() for name in ("one", "two")]
    assert has_left == [number != signal.SIGKILL] * 2
