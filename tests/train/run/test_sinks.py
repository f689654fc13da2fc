"""Sinks get the numbers of metrics.jsonl; whatever becomes of one, the run and the other sinks go on."""

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.train.sinks import MOST_WAITING, SINKS_NAME, RunName, Sinks, SinkThread, Wandb, require_packages
from dflash_offline.train.worker import train


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def write(self, step, numbers) -> None:
        self.lines.append((step, dict(numbers)))

    def close(self) -> None:
        self.is_closed = True


class Failing(Kept):
    """A network that is gone for a while."""

    def write(self, step, numbers) -> None:
        if step in (3, 4, 7):
            raise ConnectionError(f"no route to step {step}\nand more")
        super().write(step, numbers)


def send(thread: SinkThread, steps: range) -> None:
    for step in steps:
        thread.send(step, {"train/loss": float(step)})


def test_every_line_arrives_in_order():
    sink = Kept()
    thread = SinkThread("kept", lambda: sink)
    send(thread, range(1, 200))
    thread.close(30.0)
    assert sink.lines == [(step, {"train/loss": float(step)}) for step in range(1, 200)]
    assert sink.is_closed
    assert (thread.num_sent, thread.num_lost) == (199, 0)


def test_a_failing_sink_is_named_once_and_its_lost_lines_are_counted(capfd):
    sink = Failing()
    thread = SinkThread("failing", lambda: sink)
    send(thread, range(1, 11))
    thread.close(30.0)
    assert [step for step, _ in sink.lines] == [1, 2, 5, 6, 8, 9, 10]
    said = capfd.readouterr().err
    assert said.count("sink failing failed (ConnectionError: no route to step 3)") == 1
    assert "and more" not in said
    assert "sink failing lost 3 of 10 lines" in said


def test_a_sink_that_cannot_be_opened_loses_every_line(capfd):
    def refuse() -> Kept:
        raise PermissionError("not logged in")

    thread = SinkThread("shut", refuse)
    send(thread, range(5))
    thread.close(30.0)
    said = capfd.readouterr().err
    assert "sink shut failed (PermissionError: not logged in)" in said
    assert "sink shut lost 5 of 5 lines" in said


def test_a_hanging_sink_keeps_nobody_waiting(capfd):
    """It takes the first line for ever: the others wait in the queue, and those behind it are lost."""
    goes_on = threading.Event()

    class Hanging(Kept):
        def write(self, step, numbers) -> None:
            goes_on.wait()

    thread = SinkThread("hanging", Hanging)
    send(thread, range(MOST_WAITING + 50))
    thread.close(0.1)
    said = capfd.readouterr().err
    goes_on.set()
    assert thread.num_lost >= 49
    assert f"it is {MOST_WAITING} lines behind" in said
    assert f"of {MOST_WAITING + 50} lines" in said


def test_a_missing_package_is_named_at_the_start(lab, tiny_store, tmp_path):
    with pytest.raises(UserError) as caught:
        require_packages(["surely_no_such_package"])
    assert len(str(caught.value).splitlines()) == 3
    assert "pip install surely_no_such_package" in str(caught.value)
    with pytest.raises(UserError, match="sinks"):
        lab.make_config(tiny_store, tmp_path / "run", "sinks=mlflow")
    with pytest.raises(UserError, match="each sink once"):
        lab.make_config(tiny_store, tmp_path / "run", "sinks=wandb,wandb")


def test_without_sinks_nothing_is_opened(tmp_path):
    sinks = Sinks((), tmp_path, {})
    sinks.open(0, False)
    sinks.write("train", {"step": 1, "loss": 2.0})
    sinks.close(1.0)
    assert list(tmp_path.iterdir()) == []


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_what_the_file_holds_also_after_a_resume(lab, tiny_store, tmp_path):
    pytest.importorskip("tensorboard")
    config = lab.make_config(tiny_store, tmp_path / "run", "sinks=tensorboard", "keep=9")
    train(config)
    run_dir = tmp_path / "run"
    first = lab.metrics_of(run_dir)
    assert_shown(scalars(run_dir / "tensorboard"), first)
    (run_dir / "report.json").unlink()
    for step in (12, 9, 8):
        for path in sorted(run_dir.glob(f"checkpoints/step-{step:08d}/*")):
            path.unlink()
        for path in run_dir.glob(f"checkpoints/step-{step:08d}"):
            path.rmdir()
    train(config)
    assert len(list((run_dir / "tensorboard").iterdir())) == 2
    assert_shown(scalars(run_dir / "tensorboard"), lab.metrics_of(run_dir))


def assert_shown(shown, lines) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and isinstance(value, (int, float)):
                expected.setdefault(f"{line['kind']}/{name}", []).append((line["step"], value))
    assert set(shown) == set(expected)
    for tag, points in expected.items():
        assert [step for step, _ in shown[tag]] == [step for step, _ in points], tag
        assert [value for _, value in shown[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag


def test_wandb_keeps_every_number_and_its_id_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for start in (0, 5):
        run = RunName(tmp_path, start, start > 0, {"seed": 3})
        thread = SinkThread("wandb", lambda run=run: Wandb(run))
        for step in range(start + 1, start + 6):
            thread.send(step, {"train/loss": step / 2})
        thread.close(60.0)
        assert (thread.num_sent, thread.num_lost) == (5, 0)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    identity = json.loads((tmp_path / SINKS_NAME).read_text())["wandb"]
    assert {path.name for path in files} == {f"run-{identity}.wandb"}
    history = []
    for path in files:
        for data in wandb_records(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                history.append((int(items["step"]), float(items["train/loss"])))
    assert sorted(history) == [(step, step / 2) for step in range(1, 11)]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: after 7 bytes LevelDB's log format, blocks of 32 KiB, parts with a 7-byte head."""
    place, whole = 7, b""
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_a_sink_that_would_leave_the_process_is_one_that_failed(capfd):
    class Leaving(Kept):
        def write(self, step, numbers) -> None:
            raise SystemExit(2)

    thread = SinkThread("leaving", Leaving)
    send(thread, range(3))
    thread.close(30.0)
    said = capfd.readouterr().err
    assert "sink leaving failed (SystemExit: 2)" in said
    assert "sink leaving lost 3 of 3 lines" in said
