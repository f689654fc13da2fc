"""A target whose forward runs out of the device's memory: the token budget is halved, once, and nothing is lost."""

import shutil
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dealing import CheckedAgain, Halved, Recorded
from dflash_offline.extract.launch import Dealer, report
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.soundness import fault_against
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.writing import Entry, Room, SegmentFiller
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.writer import create_store
from dflash_offline.watch import Channel

MakeConfig = Callable[..., ExtractConfig]
STEP = 2.0**-7  # two units in the last place of bfloat16, relative: other shapes round differently
ONE_SEGMENT = 16384  # so that batches fill the budget
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines"


class Inline:
    def __init__(self, filler: SegmentFiller) -> None:
        self.filler = filler

    def room(self, shape: tuple[int, ...]) -> Room:
        return Room(torch.empty(shape, dtype=torch.uint8))

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        self.filler.write(room.rows.numpy(), entries)


class SmallDevice:
    """Makes a target's forwards of more tokens than `most` fail as CUDA does; `seen` are the tokens of each forward."""

    def __init__(self, target: HfTarget, most: int, *, free_forwards: int = 0) -> None:
        self.most, self.free_forwards = most, free_forwards
        self.seen: list[int] = []
        target.decoder.register_forward_pre_hook(self.hook, with_kwargs=True)

    def hook(self, module: Any, args: Any, kwargs: Any) -> None:
        num_tokens = kwargs["input_ids"].numel()
        self.seen.append(num_tokens)
        if num_tokens > self.most and len(self.seen) > self.free_forwards:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)


class Filling:
    """A store that is filled in this process, and the launcher that hears of it."""

    def __init__(self, config: ExtractConfig) -> None:
        self.found: Survey = survey(config)
        create_store(self.found.store_dir, self.found.manifest, self.found.plan.table, Path(config.data))
        self.dealer = Dealer(self.found, set())
        self.target = load_target(self.found.facts.name)
        self.committed: list[Any] = []
        self.filler = SegmentFiller(self.found.store_dir, self.found.manifest, self.committed.append)
        self.ours, theirs = Pipe()
        self.recorder = Recorder(Channel(theirs, "here"), self.dealer.order("cpu"), self.found.manifest, self.target)
        self.told: list[Any] = []

    def run(self) -> None:
        try:
            for group in self.dealer.groups:
                self.recorder.record(group, Inline(self.filler))
        finally:
            self.filler.close()
            while self.ours.poll():
                self.told.append(self.ours.recv()[1])

    def all_told(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]


def states_of(store: Path) -> list[np.ndarray]:
    reader, found = StoreReader(store, partial=True), []
    for i in range(len(reader)):
        bits = np.empty(
            (len(reader.manifest.tap_layers), int(reader.samples.n[i]), reader.manifest.hidden_size), np.uint16
        )
        reader.read(i, bits)
        found.append((bits.astype(np.uint32) << 16).view(np.float32))
    return found


@pytest.mark.parametrize("free_forwards", [0, 6])
def test_a_forward_that_does_not_fit_halves_the_budget_once_and_loses_nothing(
    tmp_path: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    capsys: pytest.CaptureFixture[str],
    free_forwards: int,
) -> None:
    """In the check before the first segment, and in the middle of a group."""
    filling = Filling(make_config(data, tmp_path / "store", segment_positions=ONE_SEGMENT))
    device = SmallDevice(filling.target, 400, free_forwards=free_forwards)
    filling.run()
    halved = filling.all_told(Halved)
    assert [(one.device, one.token_budget) for one in halved] == [("cpu", 300)]
    assert "CUDA out of memory. Tried to allocate 2.00 GiB." in halved[0].detail
    assert "more lines" not in halved[0].detail
    assert sum(tokens > 400 for tokens in device.seen[free_forwards:]) == 1
    assert max(device.seen[: free_forwards or 1]) > 400
    assert sum(one.num_positions for one in filling.all_told(Recorded)) == filling.found.plan.num_positions
    for got, expected in zip(states_of(tmp_path / "store"), states_of(whole_store), strict=True):
        scale = np.maximum(np.abs(expected), 0.01 * np.abs(expected).max(-1, keepdims=True))
        assert (np.abs(got - expected) / scale).max() < STEP

    dealer = filling.dealer
    dealer.bar = Bar()
    for message in filling.told:
        dealer.answer("shard 0 (cpu)", message)
    err = capsys.readouterr().err
    assert "shard 0 (cpu) ran out of memory" in err
    assert "goes on with token_budget = 300" in err
    assert "token budget halved by 1 of 1 workers" in dealer.bar.text
    assert (
        "memory     1 of 1 worker(s) ran out of it once and halved token_budget: cpu to 300" in report(dealer, 1).text()
    )


class Bar:
    text = ""

    def update(self, count: int) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text


def test_a_second_time_ends_the_run_with_advice_and_keeps_what_is_committed(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, extract_here: Any, content: Any
) -> None:
    store = tmp_path / "store"
    filling = Filling(make_config(data, store))
    device = SmallDevice(filling.target, 100, free_forwards=30)
    with pytest.raises(UserError, match="cpu ran out of memory a second time") as caught:
        filling.run()
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "token_budget = 300, half of 600" in lines[0]
    assert "GB of it are the states that are recorded" in lines[1]
    assert "--token-budget 150" in lines[2]
    assert len(filling.all_told(Halved)) == 1
    assert len(device.seen) > 30
    num_committed = len(filling.committed)
    assert 0 < num_committed < filling.found.plan.num_segments
    assert not list(store.rglob("*.tmp.*"))
    left = len(list((store / "commits").glob("*.arrow")))
    assert left == num_committed
    extract_here(make_config(data, store), with_frozen=not (store / "frozen").exists())
    shutil.rmtree(store / "frozen")
    whole = {name: digest for name, digest in content(whole_store).items() if name.startswith("hidden/")}
    assert {name for name in content(store) if name.startswith("hidden/")} == set(whole)


class FullDevice:
    """Makes comparing a sample with itself alone fail as CUDA does, the first few times."""

    def __init__(self, num_failures: int) -> None:
        self.left, self.num_calls = num_failures, 0

    def __call__(self, *arguments: Any) -> Any:
        self.num_calls += 1
        self.left -= 1
        if self.left >= 0:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return fault_against(*arguments)


def test_a_comparison_that_does_not_fit_is_made_again_and_loses_nothing(
    tmp_path: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    content: Any,
) -> None:
    """Behind the next batch's forward memory is at its highest; both have ended when it is made again."""
    filling = Filling(make_config(data, tmp_path / "store"))
    filling.recorder.is_chosen_again[::3] = True
    device = FullDevice(1)
    monkeypatch.setattr("dflash_offline.extract.recorder.fault_against", device)
    filling.run()
    checked = filling.all_told(CheckedAgain)
    assert device.num_calls == len(checked) + 1
    assert len(checked) >= filling.recorder.is_chosen_again.sum() > 5
    assert not any(one.has_failed for one in checked)
    assert sum(one.num_positions for one in filling.all_told(Recorded)) == filling.found.plan.num_positions


def test_a_comparison_that_never_fits_ends_in_three_lines(
    tmp_path: Path, data: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling = Filling(make_config(data, tmp_path / "store"))
    filling.recorder.is_chosen_again[:] = True
    monkeypatch.setattr("dflash_offline.extract.recorder.fault_against", FullDevice(99))
    with pytest.raises(UserError, match="cpu ran out of memory a second time") as caught:
        filling.run()
    assert "--token-budget" in caught.value.advice
