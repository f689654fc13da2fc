"""What a new run of a sweep takes over of the kernels that other runs compiled."""

from pathlib import Path

import pytest
from dflash_offline.store.files import temporary_path
from dflash_offline.train.facts import KERNELS_NAME
from dflash_offline.train.sweep.kernels import kernels_for, take_over
from dflash_offline.train.sweep.record import RunRecord, Sweep

FIELDS = ("drafter.block_size", "loss.weights", "optim.name")
SETTINGS = [(8, "decay", "muon"), (8, "decay", "adamw"), (16, "decay", "muon"), (16, "dpace", "muon")]


def sweep_of(folder: Path, states: list[str], with_kernels: list[int]) -> Sweep:
    runs = [
        RunRecord(number=number, overrides=dict(zip(FIELDS, values, strict=True)), state=state)
        for number, (values, state) in enumerate(zip(SETTINGS, states, strict=True), start=1)
    ]
    found = Sweep(
        folder=folder,
        store="",
        manifest={},
        strategy="grid",
        count=None,
        seed=None,
        fields=list(FIELDS),
        base={},
        halving=None,
        runs=runs,
    )
    for number in with_kernels:
        kernels = folder / found.run(number).folder / KERNELS_NAME
        (kernels / "ab").mkdir(parents=True)
        (kernels / "ab" / "kernel.py").write_text(f"of run {number}")
    return found


@pytest.mark.parametrize(
    "states, with_kernels, taken",
    [
        (["finished", "finished", "finished", "waiting"], [1, 2, 3], 3),  # one field differs; of run 1 two, of 2 three
        (["finished", "finished", "paused", "waiting"], [1, 2, 3], 3),
        (["out", "finished", "running", "waiting"], [1, 2, 3], 1),
        (["finished", "finished", "interrupted", "waiting"], [1, 3], 1),
        (["running", "failed", "interrupted", "waiting"], [1, 2, 3], None),
        (["finished", "finished", "finished", "waiting"], [], None),
        (["finished", "finished", "finished", "waiting"], [1, 4], None),  # it has its own
    ],
)
def test_kernels_come_from_the_nearest_run_that_is_at_rest(tmp_path, states, with_kernels, taken):
    found = sweep_of(tmp_path, states, with_kernels)
    expected = None if taken is None else tmp_path / "runs" / f"000{taken}" / KERNELS_NAME
    assert kernels_for(found, found.run(4)) == expected


@pytest.fixture
def beats() -> list[int]:
    return []


def test_a_copy_is_the_runs_own(tmp_path, beats):
    found = sweep_of(tmp_path, ["finished", "waiting", "waiting", "waiting"], [1])
    theirs, run_dir = tmp_path / "runs" / "0001" / KERNELS_NAME, tmp_path / "runs" / "0002"
    assert take_over(theirs, run_dir, lambda: beats.append(1)) == ""
    own = run_dir / KERNELS_NAME / "ab" / "kernel.py"
    (theirs / "ab" / "kernel.py").write_text("another one")
    assert own.read_text() == "of run 1"
    assert kernels_for(found, found.run(2)) is None, "taken over once, before the first start"
    assert len(beats) == 1


def test_a_copy_that_fails_says_why_and_leaves_nothing(tmp_path, beats):
    sweep_of(tmp_path, ["finished", "waiting", "waiting", "waiting"], [1])
    theirs, run_dir = tmp_path / "runs" / "0001" / KERNELS_NAME, tmp_path / "runs" / "0002"
    (theirs / "ab" / "gone").symlink_to("nowhere")
    reason = take_over(theirs, run_dir, lambda: beats.append(1))
    assert "ab/gone" in reason
    assert "No such file" in reason
    assert "\n" not in reason
    assert not list(run_dir.iterdir())


def test_what_killed_copies_left_goes_before_the_next_one(tmp_path, beats):
    sweep_of(tmp_path, ["finished", "waiting", "waiting", "waiting"], [1])
    theirs, run_dir = tmp_path / "runs" / "0001" / KERNELS_NAME, tmp_path / "runs" / "0002"
    left = temporary_path(run_dir / KERNELS_NAME).with_suffix(".1")
    left.mkdir(parents=True)
    (left / "half").write_text("a part")
    assert take_over(theirs, run_dir, lambda: beats.append(1)) == ""
    assert [path.name for path in run_dir.iterdir()] == [KERNELS_NAME]


def test_a_field_that_a_run_does_not_set_has_the_value_of_all(tmp_path):
    """Run 2 differs from run 4 by nothing, although it names nothing."""
    found = sweep_of(tmp_path, ["finished", "finished", "finished", "waiting"], [1, 2, 3])
    found.base = {name: value for name, value in zip(FIELDS, SETTINGS[3], strict=True)}
    found.run(2).overrides.clear()
    assert kernels_for(found, found.run(4)) == tmp_path / "runs" / "0002" / KERNELS_NAME
