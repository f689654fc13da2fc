"""The loader against a slow, obvious reading of the store, and what happens when it fails."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.manifest import read_manifest
from dflash_offline.store.ranges import as_ranges
from dflash_offline.store.reader import StoreReader
from dflash_offline.train.loader import Loader, LoaderPlan
from dflash_offline.train.order import ALL, Place, RowOrder, samples_of
from dflash_offline.train.packing import choose_anchors, pack_rows
from dflash_offline.train.slot import RowArrays, RowShape, RowSlot
from dflash_offline.watch import ChildDied, Stalled

SHAPE = RowShape(row_tokens=128, anchors=16, block_size=8)
HIDDEN = 32
FIELDS = ("taps", "ids", "loss_mask", "sample_ids", "positions", "anchors", "keep")


@pytest.fixture(scope="module")
def plan(tiny_store):
    slot = RowSlot(shape=SHAPE, num_taps=2, hidden_size=HIDDEN, codec_name="raw")
    return LoaderPlan(
        store_dir=tiny_store,
        segments=ALL,
        snapshot=StoreReader(tiny_store).snapshot,
        taps=(2, 0),
        slot=slot,
        seed=3,
        shuffle_segments=4,
        start=Place(0, 0),
        num_rows=40,
    )


def on_store(plan: LoaderPlan, store: Path, **changes: Any) -> LoaderPlan:
    """The plan for another store, as that is now."""
    snapshot = StoreReader(store, partial=True).snapshot
    return replace(plan, store_dir=store, snapshot=snapshot, **changes)


def open_loader(plan: LoaderPlan, *, slots: int = 2, stall_s: float = 300.0) -> Loader:
    return Loader(plan, slots=slots, stall_s=stall_s, beat=lambda: None)


def copied(arrays: RowArrays) -> dict[str, np.ndarray]:
    """The arrays of a row, its taps decoded: [Lt, T, H] u16."""
    taps = np.empty((*arrays.taps.shape[:2], HIDDEN), np.uint16)
    arrays.codec.decode(arrays.taps, taps)
    return {name: getattr(arrays, name).copy() for name in FIELDS} | {"taps": taps}


def loaded(plan: LoaderPlan) -> list[tuple[Place, dict[str, np.ndarray]]]:
    with open_loader(plan) as loader:
        rows = []
        for _ in range(plan.num_rows):
            with loader.row() as row:
                rows.append((row.place, copied(row.arrays)))
        return rows


def read_slowly(plan: LoaderPlan, reader: StoreReader, epoch: int, number: int, row: np.ndarray) -> dict:
    """One row, token by token, from whole samples; `row` holds reader numbers."""
    shape = plan.slot.shape
    T, B = shape.row_tokens, shape.block_size
    out = {
        "taps": np.zeros((len(plan.taps), T, plan.slot.hidden_size), np.uint16),
        "ids": np.zeros(T + B, np.int64),
        "loss_mask": np.zeros(T + B, np.bool_),
        "sample_ids": np.full(T, -1, np.int32),
        "positions": np.zeros(T, np.int32),
    }
    eligible = np.zeros(T, np.bool_)
    t = 0
    for order, i in enumerate(row.tolist()):
        ids, mask = reader.tokens(i)
        anchors = [a for a in range(len(ids) - 1) if mask[a] and mask[a + 1]]
        window = reader.manifest.window
        first = 0 if window is None else max(0, anchors[0] - window)
        n = anchors[-1] + 1 - first
        states = np.empty((3, n, plan.slot.hidden_size), np.uint16)
        reader.read(i, states)
        for p in range(first, first + n + 1):
            out["ids"][t], out["loss_mask"][t] = ids[p], mask[p]
            out["sample_ids"][t], out["positions"][t] = order, p
            eligible[t] = p < first + n and mask[p] and mask[p + 1]
            for to, tap in enumerate(plan.taps):
                if p < first + n:
                    out["taps"][to, t] = states[tap, p - first]
            t += 1
    out["anchors"], out["keep"] = choose_anchors(
        eligible, out["sample_ids"], shape.anchors, unit=shape.unit, seed=plan.seed, epoch=epoch, row=number
    )
    return out


def rows_slowly(plan: LoaderPlan) -> list[tuple[Place, dict[str, np.ndarray]]]:
    """All rows of the run from its beginning, pass after pass."""
    reader = StoreReader(plan.store_dir)
    numbers = [i for i in range(len(reader)) if reader.samples.split[i] == "train"]
    lengths = reader.samples.n[numbers] + 1
    found: list[tuple[Place, dict[str, np.ndarray]]] = []
    epoch = 0
    while len(found) < plan.num_rows:
        packed = pack_rows(
            lengths,
            reader.samples.segment[numbers],
            plan.slot.shape.row_tokens,
            seed=plan.seed,
            epoch=epoch,
            shuffle_segments=plan.shuffle_segments,
        )
        for row, members in enumerate(packed):
            chosen = np.array(numbers)[members]
            found.append((Place(epoch, row), read_slowly(plan, reader, epoch, row, chosen)))
        epoch += 1
    return found[: plan.num_rows]


def assert_rows(left, right):
    assert [place for place, _ in left] == [place for place, _ in right]
    for (place, a), (_, b) in zip(left, right):
        for name in FIELDS:
            np.testing.assert_array_equal(a[name], b[name], err_msg=f"{name} of {place}")


@pytest.fixture(scope="module")
def slow_rows(plan):
    return rows_slowly(plan)


def test_rows_equal_the_store_read_token_by_token(plan, slow_rows):
    assert slow_rows[-1][0].epoch >= 1, "the rows cross a pass"
    assert_rows(loaded(plan), slow_rows)


def test_rows_of_a_store_with_a_window(lab, plan, tmp_path):
    """Several samples a row, each from its own first token on."""
    store = lab.make_store(tmp_path, window=9)
    assert (StoreReader(store).samples.first > 0).sum() > 20
    cut = on_store(plan, store, num_rows=12)
    assert_rows(loaded(cut), rows_slowly(cut))


@pytest.mark.parametrize("codec", ["zstd", "int8:4"])
def test_rows_of_an_encoded_store_decode_to_what_the_store_holds(lab, plan, tmp_path, codec):
    store = lab.make_store(tmp_path, codec=codec)
    encoded = on_store(plan, store, slot=replace(plan.slot, codec_name=codec), num_rows=12)
    assert_rows(loaded(encoded), rows_slowly(encoded))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("codec", ["raw", "zstd", "int8:4"])
def test_last_states_come_along_where_the_slot_has_room(lab, plan, tmp_path, codec, window):
    """Against the states that were recorded, sample by sample; zeros where there is none."""
    store = lab.make_store(tmp_path, codec=codec, has_last=True, window=window)
    asked = on_store(plan, store, slot=replace(plan.slot, codec_name=codec, has_last=True), num_rows=12)
    without = replace(asked.slot, has_last=False)
    assert asked.slot.size_bytes - without.size_bytes == 128 * asked.slot.codec.row_bytes(32)
    reader = StoreReader(store)
    order = RowOrder.of(reader, samples_of(reader, "train", ALL), SHAPE, seed=3, shuffle_segments=4)
    with open_loader(asked) as loader:
        for _ in range(12):
            with loader.row() as row:
                found = np.empty((128, HIDDEN), np.uint16)
                assert row.arrays.last is not None
                row.arrays.codec.decode(row.arrays.last, found)
                place = row.place
            end = 0
            for i in order.rows(place.epoch)[place.row].tolist():
                n = int(reader.samples.n[i])
                states = np.empty((n, HIDDEN), np.uint16)
                reader.read_last(i, states)
                np.testing.assert_array_equal(found[end : end + n], states)
                if not codec.startswith("int8"):
                    made = lab.last_states(int(reader.samples.sample_id[i]), int(reader.samples.first[i]), n)
                    np.testing.assert_array_equal(states, made)
                assert not found[end + n].any()
                end += n + 1
            assert not found[end:].any()


def test_taps_are_the_same_with_last_states_beside_them(lab, plan, tmp_path):
    store = lab.make_store(tmp_path, has_last=True)
    assert_rows(loaded(on_store(plan, store, slot=replace(plan.slot, has_last=True), num_rows=12)), loaded(plan)[:12])


def test_a_slot_for_last_states_on_a_store_without_them(plan):
    asked = replace(plan, slot=replace(plan.slot, has_last=True))
    with open_loader(asked) as loader, pytest.raises(UserError, match="holds no last hidden states"):
        take_all(loader)


def test_a_loader_told_another_codec_than_the_store_s_fails_by_name(plan):
    other = replace(plan, slot=replace(plan.slot, codec_name="int8:4"))
    with open_loader(other) as loader, pytest.raises(ValueError, match=r"rows are .* 50\), expected .* 64\)"):
        take_all(loader)


@pytest.mark.parametrize("done", [1, 17])
def test_a_resumed_loader_goes_on_with_the_next_row(plan, slow_rows, done):
    epoch, row = slow_rows[done - 1][0]
    resumed = replace(plan, start=Place(epoch, row + 1), num_rows=40 - done)
    assert_rows(loaded(resumed), slow_rows[done:])


def test_after_the_last_row_of_a_pass_comes_the_next_pass(plan, slow_rows):
    last = max(place.row for place, _ in slow_rows if place.epoch == 0)
    resumed = replace(plan, start=Place(0, last + 1), num_rows=2)
    assert [place for place, _ in loaded(resumed)] == [Place(1, 0), Place(1, 1)]


def test_a_row_in_use_is_never_written(plan):
    with open_loader(plan, slots=2) as loader:
        for _ in range(5):
            with loader.row() as row:
                before = copied(row.arrays)
                while not loader.ready and not loader.child.has_ended:
                    loader.child.listen(loader.note, 5.0)  # the loader fills its other slot meanwhile
                after = copied(row.arrays)
            for name in FIELDS:
                np.testing.assert_array_equal(before[name], after[name])


def test_a_loader_killed_by_the_system_is_noticed_and_named(plan):
    with open_loader(plan) as loader:
        with loader.row():
            os.kill(loader.child.process.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="loader was killed by SIGKILL"):  # and not Stalled, much later
            take_all(loader)


def take_all(loader: Loader) -> None:
    while True:
        with loader.row():
            pass


def test_a_wedged_loader_is_named_after_the_limit(plan, capfd):
    with open_loader(plan, stall_s=0.5) as loader:
        loader.stall_s = 300.0  # for the start of the process
        with loader.row():
            pass
        loader.stall_s = 0.5
        os.kill(loader.child.process.pid, signal.SIGSTOP)
        with pytest.raises(Stalled, match=r"the trainer waited for row \d+ of epoch 0 from the loader for 0.5 s"):
            take_all(loader)
        pid = loader.child.process.pid
    assert "stacks of loader" in capfd.readouterr().err
    assert not os.path.exists(f"/proc/{pid}"), "a stopped loader is ended too"


def test_a_damaged_store_is_named_in_the_trainer(plan, tmp_path):
    store = shutil.copytree(plan.store_dir, tmp_path / "store")
    for path in (store / "hidden").glob("c.*"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    with open_loader(replace(plan, store_dir=store)) as loader, pytest.raises(UserError, match="cannot be trusted"):
        take_all(loader)


def test_a_snapshot_gives_the_same_rows_after_more_was_committed(lab, plan, tmp_path):
    store = lab.make_store(tmp_path, num_committed=9)
    reader = StoreReader(store, partial=True)
    segments = as_ranges(np.unique(reader.samples.segment))
    partial = on_store(plan, store, segments=segments, num_rows=8)
    before = loaded(partial)
    manifest = read_manifest(store)
    lab.fill_segments(store, manifest, range(9, manifest.num_segments))
    assert len(StoreReader(store)) > len(reader)
    assert_rows(loaded(partial), before)


@pytest.mark.parametrize("num_committed", [None, 9])
def test_states_that_were_exchanged_after_the_check_are_refused(lab, plan, tmp_path, num_committed):
    """The run was checked with other states than the loader finds: both snapshots are named."""
    store = lab.make_store(tmp_path, num_committed=num_committed)
    reader = StoreReader(store, partial=True)
    segments = ALL if num_committed is None else as_ranges(np.unique(reader.samples.segment))
    checked = on_store(plan, store, segments=segments)
    lab.fill_segments(store, read_manifest(store), range(2, 3), shift=1)
    found = StoreReader(store, partial=True).snapshot
    with open_loader(checked) as loader, pytest.raises(UserError, match=f"snapshot {found}") as caught:
        take_all(loader)
    assert f"snapshot {checked.snapshot} of segments {segments}" in caught.value.expected


def test_every_sample_is_trained_on_once_a_pass(tiny_store):
    reader = StoreReader(tiny_store)
    samples = samples_of(reader, "train", ALL)
    order = RowOrder.of(reader, samples, SHAPE, seed=0, shuffle_segments=2)
    for epoch in range(2):
        assert sorted(np.concatenate(order.rows(epoch)).tolist()) == samples.tolist()


def test_the_plan_travels(plan):
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("module", ["loader", "worker", "outcome"])
def test_loader_and_launcher_are_free_of_torch(module):
    code = f"import sys, dflash_offline.train.{module}; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
