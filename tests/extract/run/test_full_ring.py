"""A disk that is slower than the target: the worker waits for a slot, and the bar and the report say for how long."""

import threading
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dealing import Recorded
from dflash_offline.extract.launch import Dealer, report
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.writing import (
    BEAT_S,
    NUM_SLOTS,
    Committed,
    Entry,
    Room,
    SegmentFiller,
    WriterProcess,
    Written,
)
from dflash_offline.store.writer import create_store
from dflash_offline.watch import Channel

MakeConfig = Callable[..., ExtractConfig]


class Bar:
    text = ""

    def update(self, count: int) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text


def test_the_bar_and_the_report_name_the_share_of_time_that_was_waited(
    data: Path, whole_store: Path, make_config: MakeConfig
) -> None:
    dealer = Dealer(survey(make_config(data, whole_store, shards=2)), set())
    dealer.bar = Bar()
    dealer.answer("a", Recorded(10, 99.0))  # before the clock starts: a target was loaded
    dealer.answer("b", Recorded(10, 0.0))
    assert dealer.bar.text == f"0/{len(dealer.own)} segments"
    dealer.answer("a", Recorded(10, 0.6))
    dealer.answer("b", Recorded(10, 0.2))
    dealer.first_recorded_s = dealer.last_recorded_s - 4.0
    dealer.answer("a", Committed(0))
    assert dealer.waited_share == pytest.approx(0.8 / (4.0 * 2))
    assert dealer.bar.text == f"1/{len(dealer.own)} segments, disk slower than the target: waited 10% of the time"
    assert "disk       the workers waited 10% of their time for it" in report(dealer, 4.0).text()


def test_a_worker_waits_for_a_slot_and_counts_it(tmp_path: Path, whole_store: Path) -> None:
    """The writer process is there, but every slot is out; one comes back when the worker has waited for a beat."""
    ours, theirs = Pipe()
    with WriterProcess(Channel(theirs, "here"), whole_store, slot_bytes=64, device="cpu", stall_s=60.0) as writer:
        rooms = [writer.room((1, 1, 2, 32)) for _ in range(NUM_SLOTS)]
        assert sorted(room.slot for room in rooms) == list(range(NUM_SLOTS))
        assert max(room.waited_s for room in rooms) < BEAT_S
        was_beaten: list[bool] = []

        def give_back() -> None:
            was_beaten.append(ours.poll(60.0))
            writer.note("writer", Written(rooms[2].slot))

        threading.Thread(target=give_back).start()
        room = writer.room((1, 1, 1, 32))
        assert was_beaten == [True]
        assert room.slot == rooms[2].slot
        assert room.waited_s > 0.99 * BEAT_S
        room.rows.fill_(7)
        assert (writer.ring.slot(room.slot)[:32] == 7).all()
    ours.close()


class Slow:
    """Writes in this process; notes how many batches were sent to the device when each came to be written."""

    def __init__(self, filler: SegmentFiller) -> None:
        self.filler = filler
        self.num_rooms = 0
        self.ahead: list[int] = []

    def room(self, shape: tuple[int, ...]) -> Room:
        self.num_rooms += 1
        return Room(torch.empty(shape, dtype=torch.uint8), waited_s=0.25)

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        self.ahead.append(self.num_sent - self.num_rooms)
        self.filler.write(room.rows.numpy(), entries)

    num_sent = 0


def test_the_next_forward_is_sent_before_a_batch_is_judged_and_written(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, content: Any
) -> None:
    """One batch ahead, and the bytes are those of the run without."""
    config = make_config(data, tmp_path / "store")
    found: Survey = survey(config)
    create_store(found.store_dir, found.manifest, found.plan.table, Path(config.data))
    dealer = Dealer(found, set())
    target = load_target(found.facts.name)
    ours, theirs = Pipe()
    recorder = Recorder(Channel(theirs, "here"), dealer.order("cpu"), found.manifest, target)
    writer = Slow(SegmentFiller(found.store_dir, found.manifest, lambda _: None))
    send = recorder.send

    def counted(*args: Any) -> Any:
        writer.num_sent += 1
        return send(*args)

    recorder.send = counted  # type: ignore[method-assign]
    for group in dealer.groups:
        recorder.record(group, writer)
    assert set(writer.ahead) == {0, 1}, "of every group but its last batch, one more was sent than had come to its copy"
    waited = []
    while ours.poll():
        message = ours.recv()[1]
        waited += [message.waited_s] if isinstance(message, Recorded) else []
    assert waited == [0.25] * writer.num_rooms
    hidden = {name: digest for name, digest in content(whole_store).items() if name.startswith("hidden/c.")}
    assert {name: digest for name, digest in content(tmp_path / "store").items() if name in hidden} == hidden
