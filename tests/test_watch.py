"""Deaths, silence, replies and what is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.watch import Child, ChildDied, Job, PeerLost, Stalled, run_all
from processes import is_alive

STALL_S = 6.0  # the start of a child counts: 2.4 s on one core that twenty others wanted


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import watch_children  # pyright: ignore[reportMissingImports]

    return watch_children


def wait_until(condition: Any, limit_s: float = 30.0) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, "waited in vain"
        time.sleep(0.02)


def ignore(_name: str, _message: object) -> None:
    pass


def test_messages_come_in_order_and_an_ask_gets_its_reply(children: ModuleType) -> None:
    heard: dict[str, list[object]] = {"a": [], "b": []}

    def answer(name: str, message: object) -> object:
        heard[name].append(message)
        return sum(i for i in heard[name] if isinstance(i, int))

    run_all([Job("a", children.count, (5,)), Job("b", children.count, (300,))], stall_s=60.0, on_message=answer)
    assert heard["a"] == [0, 1, 2, 3, 4, ("sum", 5)]
    assert heard["b"] == [*range(300), ("sum", 300)]


def test_no_jobs_end_at_once() -> None:
    run_all([], stall_s=1.0, on_message=ignore)


def test_user_error_passes_through_and_the_others_are_stopped(children: ModuleType) -> None:
    pids: list[int] = []
    jobs = [Job("good", children.work_for_ever), Job("bad", children.refuse)]
    with pytest.raises(UserError, match="the disk is full") as caught:
        run_all(jobs, stall_s=60.0, on_message=lambda _name, pid: pids.append(pid))  # type: ignore[arg-type]
    assert any("raised in bad" in note for note in caught.value.__notes__)
    assert not any(is_alive(pid) for pid in pids)


def test_exception_that_cannot_travel_keeps_its_text(children: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: 3 and 4") as caught:
        run_all([Job("odd", children.fail_oddly)], stall_s=60.0, on_message=ignore)
    assert "fail_oddly" in caught.value.__notes__[0]


def test_killed_child_is_named_and_its_last_words_are_heard(children: ModuleType) -> None:
    words: list[object] = []
    jobs = [Job("shard 0", children.work_for_ever), Job("shard 1", children.kill_itself)]
    with pytest.raises(ChildDied, match="shard 1 was killed by SIGKILL") as caught:
        run_all(jobs, stall_s=60.0, on_message=lambda _name, word: words.append(word))
    assert (caught.value.name, caught.value.exit_code) == ("shard 1", -signal.SIGKILL)
    assert "last words" in words
    assert not any(isinstance(pid, int) and is_alive(pid) for pid in words)


def test_early_exit_is_a_death(children: ModuleType) -> None:
    with pytest.raises(ChildDied, match="early ended with exit code 7"):
        run_all([Job("early", children.leave_early)], stall_s=60.0, on_message=ignore)


def test_silence_dumps_stacks_and_names_the_silent(children: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    pids: list[Any] = []
    jobs = [Job("busy", children.work_for_ever), Job("quiet", children.hang)]
    with pytest.raises(Stalled, match="sign of life from quiet for 6.0 s"):
        run_all(jobs, stall_s=STALL_S, on_message=lambda _name, pid: pids.append(pid))
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    stacks = capfd.readouterr().err
    assert "--- stacks of busy" in stacks
    assert "in hang" in stacks


def test_the_silence_of_one_who_waits_is_that_of_the_others(
    children: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who works keeps a waiting one from being a stall; who is silent is named in its place."""
    waiting = Job("waiting", children.wait_for_others)
    with pytest.raises(UserError, match="worked to the end"):
        run_all([waiting, Job("busy", children.work_then_end, (STALL_S + 1.5,))], stall_s=STALL_S, on_message=ignore)
    assert "--- stacks" not in capfd.readouterr().err
    pids: list[Any] = []
    with pytest.raises(Stalled, match=r"a sign of life from quiet \(stopped by a signal\) for 6.0 s"):
        run_all(
            [waiting, Job("quiet", children.stop_itself)],
            stall_s=STALL_S,
            on_message=lambda _name, pid: pids.append(pid),
        )
    assert "in wait_for_others" in capfd.readouterr().err
    assert not any(is_alive(pid) for pid in pids)


def test_where_all_wait_for_one_another_all_are_named(children: ModuleType) -> None:
    jobs = [Job(name, children.wait_for_others) for name in ("a", "b")]
    with pytest.raises(Stalled, match=r"[ab] \(waits for the others: the sum of all\), [ab] \(waits"):
        run_all(jobs, stall_s=STALL_S, on_message=ignore)


def test_one_that_a_signal_stopped_is_named_alone_where_all_wait(children: ModuleType) -> None:
    jobs = [Job("waits", children.wait_for_others), Job("stopped", children.be_stopped)]
    told = r"from stopped \(waits for the others: the sum of all, stopped by a signal\) for"
    with pytest.raises(Stalled, match=told):
        run_all(jobs, stall_s=STALL_S, on_message=ignore)


def test_a_death_is_named_before_those_who_noticed_it(children: ModuleType) -> None:
    jobs = [Job("notices", children.lose), Job("dies", children.die_later)]
    with pytest.raises(ChildDied, match="dies was killed by SIGKILL"):
        run_all(jobs, stall_s=60.0, on_message=ignore)
    with pytest.raises(PeerLost, match="lost the other one"):
        run_all([Job("notices", children.lose)], stall_s=60.0, on_message=ignore)


def test_children_that_handle_sigterm_leave_by_themselves(children: ModuleType, tmp_path: Path) -> None:
    ready: list[str] = []

    def end_when_ready(name: str, _message: object) -> None:
        ready.append(name)
        if len(ready) == 2:
            signal.raise_signal(signal.SIGTERM)

    jobs = [Job(name, children.leave_when_told, (str(tmp_path), name)) for name in ("a", "b")]
    with pytest.raises(SystemExit) as caught:
        run_all(jobs, stall_s=60.0, on_message=end_when_ready, leave_s=30.0)
    assert caught.value.code == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_reply_that_does_not_come_is_a_stall(children: ModuleType) -> None:
    pids: list[Any] = []

    def slow(_name: str, message: object) -> None:
        """Replies when nobody waits for it any more."""
        if message == "slow":
            wait_until(lambda: not is_alive(pids[0]))
        else:
            pids.append(message)

    with pytest.raises(Stalled, match="asker waited for a reply of its parent to 'slow'"):
        run_all([Job("asker", children.ask_in_vain)], stall_s=60.0, on_message=slow)


def test_error_in_the_launcher_stops_the_children(children: ModuleType) -> None:
    pids: list[Any] = []

    def fail(_name: str, pid: object) -> None:
        pids.append(pid)
        raise ValueError("cannot draw")

    with pytest.raises(ValueError, match="cannot draw"):
        run_all([Job("one", children.work_for_ever)], stall_s=60.0, on_message=fail)
    assert not is_alive(pids[0])


def test_grandchild_of_a_finished_child_is_ended(children: ModuleType) -> None:
    pids: list[Any] = []
    run_all([Job("one", children.leave_a_grandchild)], stall_s=60.0, on_message=lambda _name, pid: pids.append(pid))
    wait_until(lambda: not is_alive(pids[0]))


def test_child_beside_a_working_parent(children: ModuleType) -> None:
    heard: list[Any] = []
    child = Child(Job("doubler", children.double))
    for number in range(5):
        child.tell(number)
    child.tell(None)
    started = time.monotonic()
    while not child.has_ended:
        child.listen(lambda _name, word: heard.append(word), 1.0)
        assert time.monotonic() - started < 30.0
    assert child.is_done
    assert heard == [0, 2, 4, 6, 8]


def test_child_that_dies_or_waits_in_vain_is_heard_by_listen(children: ModuleType) -> None:
    killed = Child(Job("killed", children.double))
    os.kill(killed.process.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="killed was killed by SIGKILL"):
        for _ in range(2):  # its connection may end a moment before the process itself
            killed.listen(ignore, 30.0)
    assert killed.has_ended
    waiting = Child(Job("waiting", children.receive_in_vain))
    with pytest.raises(Stalled, match="waiting waited for a message of its parent"):
        waiting.listen(ignore, 30.0)
    waiting.end()


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_dead_launcher_leaves_no_child(children: ModuleType, tmp_path: Path, number: int, code: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", "import sys, watch_children as w; w.launch(sys.argv[1])", str(tmp_path / "pids")]
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        launcher.send_signal(number)
        launcher.communicate(timeout=120)
        assert launcher.returncode == code
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        launcher.kill()


def test_a_signal_does_not_cut_the_handling_of_a_message_in_half(children: ModuleType) -> None:
    handled: list[str] = []

    def hear(_name: str, message: object) -> None:
        handled.append(f"begun {message}")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        handled.append(f"ended {message}")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        run_all([Job("teller", children.count, (1,))], stall_s=60.0, on_message=hear)
    assert caught.value.code == 128 + signal.SIGTERM
    assert len(handled) == 2
    assert handled[1] == handled[0].replace("begun", "ended")
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_is_not_replaced_by_a_signal_that_came_meanwhile(children: ModuleType) -> None:
    def fail(_name: str, _message: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise UserError("the disk is full", "1 GB", "free some")

    with pytest.raises(UserError, match="the disk is full"):
        run_all([Job("teller", children.count, (1,))], stall_s=60.0, on_message=fail)


def test_an_error_is_not_replaced_by_a_signal_while_children_are_stopped(children: ModuleType) -> None:
    pids: list[Any] = []

    def note(name: str, message: object) -> object:
        if name == "hangs up":
            pids.append(message)
        return bool(pids)

    jobs = [Job("hangs up", children.hang_up_on_parent), Job("refuses", children.refuse_when_told)]
    with pytest.raises(UserError, match="the disk is full"):
        run_all(jobs, stall_s=60.0, on_message=note)
    assert not is_alive(pids[0])


def test_a_child_that_dies_in_the_middle_of_a_message_is_named(children: ModuleType) -> None:
    with pytest.raises(ChildDied, match="speaker was killed by SIGKILL"):
        run_all([Job("speaker", children.die_while_speaking)], stall_s=60.0, on_message=ignore)


def test_an_error_is_not_replaced_by_a_child_that_cannot_be_killed(
    children: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One inside a system call to a dead network disk, that is: it ends when the disk answers."""
    wait, stuck = subprocess.Popen.wait, []

    def wait_in_vain(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        stuck.append(process)
        raise subprocess.TimeoutExpired(process.args, timeout or 0.0)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_in_vain)
    with pytest.raises(UserError, match="the disk is full"):
        run_all([Job("bad", children.refuse)], stall_s=60.0, on_message=ignore)
    for process in stuck:
        wait(process, 30.0)
    assert f"bad (pid {stuck[0].pid}) was killed and has not ended after" in capfd.readouterr().err


def test_a_child_whose_parent_is_gone_is_silent(children: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """A moment before it is killed with it, it may see the end of its connection."""
    child = Child(Job("left", children.double))
    child.connection.close()
    assert child.process.wait(60.0) == 1
    os.close(child.pidfd)
    assert capfd.readouterr().err == ""


def launched(program: str, **streams: Any) -> int:
    """The exit code of a launcher of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-c", f"import watch_children as w; {program}"]
    return subprocess.run(command, env=environment, timeout=120, **streams).returncode


def test_a_stall_is_told_where_stderr_takes_nothing(children: ModuleType) -> None:
    with open("/dev/full", "w") as full:
        assert launched("w.hang_silently('3')", stderr=full) == 3


def test_a_child_has_ended_well_where_stdout_takes_nothing(children: ModuleType) -> None:
    program = "w.run_all([w.Job('one', w.say_something)], stall_s=60.0, on_message=print)"
    with open("/dev/full", "w") as full:
        assert launched(program, stdout=full) == 0


def test_a_command_under_nohup_outlives_its_terminal(children: ModuleType) -> None:
    assert launched("w.outlive_terminal()") == 0
