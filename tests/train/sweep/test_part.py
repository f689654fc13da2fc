"""All runs of a sweep read the same states of its store, also while it grows; another store is refused."""

from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.store.manifest import read_manifest
from dflash_offline.store.ranges import ALL
from dflash_offline.store.reader import StoreReader
from dflash_offline.train.facts import StorePart
from dflash_offline.train.run import check_run
from dflash_offline.train.sweep.check import Device, config_of, require_all
from dflash_offline.train.sweep.record import WAITING, Sweep, merged, read_sweep
from dflash_offline.train.sweep.sweep import make_folder_of, planned

NUM_COMMITTED = 9


def checked(lab, store: Path, out: Path, seeds: list[int], **base) -> Sweep:
    """The sweep as a command checks it before the first run starts, written as one does."""
    wanted = planned(lab.config_of(store, out, fields={"seed": seeds}), lab.base | base)
    known = merged(read_sweep(out), wanted)
    require_all(known, known.with_state(WAITING), [Device("cpu")])
    make_folder_of(out)
    known.write()
    return known


@pytest.fixture
def growing(runs_lab, tmp_path) -> Path:
    return runs_lab.make_store(tmp_path, num_committed=NUM_COMMITTED)


def test_runs_added_to_a_sweep_on_a_store_that_has_grown_read_what_the_first_ones_read(
    lab, runs_lab, growing, tmp_path
):
    before = checked(lab, growing, tmp_path / "out", [1], partial=True).part
    with StoreReader(growing, partial=True) as reader:
        num_held_out = len(reader.rows("heldout"))
        assert before == StorePart("0-8", reader.snapshot)
    manifest = read_manifest(growing)
    runs_lab.fill_segments(growing, manifest, range(NUM_COMMITTED, manifest.num_segments))
    known = checked(lab, growing, tmp_path / "out", [1, 2], partial=True)
    assert known.part == before
    for run in known.runs:
        facts = check_run(config_of(known, run, "cpu"), lambda: "cpu", part=known.part).facts
        assert StorePart(facts.segments, facts.snapshot) == before
        assert facts.num_held_out == num_held_out
    now = check_run(config_of(known, known.runs[0], "cpu"), lambda: "cpu").facts
    assert (now.segments, now.num_held_out) == (ALL, 5), "a run of its own reads all that is there now"


def test_states_that_were_made_anew_are_refused_for_further_runs(lab, runs_lab, growing, tmp_path):
    checked(lab, growing, tmp_path / "out", [1], partial=True)
    for path in [*growing.glob("commits/*"), *growing.glob("hidden/c/*/*/*")]:
        path.unlink()
    runs_lab.fill_segments(growing, read_manifest(growing), range(NUM_COMMITTED), shift=1)
    with pytest.raises(UserError, match="the sweep began with 0-8") as caught:
        checked(lab, growing, tmp_path / "out", [1, 2], partial=True)
    assert caught.value.advice == "bring the store back as it was, or begin a sweep in another --out"
    assert len(str(caught.value).splitlines()) == 3


def test_a_store_that_is_not_complete_needs_partial(lab, growing, tmp_path):
    with pytest.raises(UserError, match="is not complete"):
        checked(lab, growing, tmp_path / "out", [1])
    assert not (tmp_path / "out").exists()


def test_a_complete_store_is_read_whole(lab, tiny_store, tmp_path):
    part = checked(lab, tiny_store, tmp_path / "out", [1]).part
    with StoreReader(tiny_store) as reader:
        assert part == StorePart(ALL, reader.snapshot)


@pytest.mark.parametrize(
    "other, told",
    [({"taps": (0, 3)}, r"store.tap_layers was \[0, 2, 3\]"), ({"codec": "int8:4"}, "store.codec was 'raw'")],
)
def test_another_store_of_the_same_samples_is_refused(lab, runs_lab, tiny_store, tmp_path, other, told):
    checked(lab, tiny_store, tmp_path / "out", [1])
    store = runs_lab.make_store(tmp_path / "other", **other)
    with pytest.raises(UserError, match=told):
        checked(lab, store, tmp_path / "out", [1])
