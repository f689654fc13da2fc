"""A target that goes wrong while a store is filled: found by samples run again alone, marked, counted."""

from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dealing import CheckedAgain, Note
from dflash_offline.extract.launch import Dealer, extract
from dflash_offline.extract.recheck import SHARE, chosen_again
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.survey import survey
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.writing import Entry, Room, SegmentFiller
from dflash_offline.store.index import STATUS_FAILED, STATUS_OK, read_commits
from dflash_offline.store.writer import create_store
from dflash_offline.watch import Channel

MakeConfig = Callable[..., ExtractConfig]
NUM_LINES = 700


class Inline:
    """Writes in this process, without a ring between."""

    def __init__(self, filler: SegmentFiller) -> None:
        self.filler = filler

    def room(self, shape: tuple[int, ...]) -> Room:
        return Room(torch.empty(shape, dtype=torch.uint8))

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        self.filler.write(room.rows.numpy(), entries)


@pytest.fixture(scope="module")
def many(make_data: Callable[..., Path], case_target: Any) -> Path:
    """DATA of `NUM_LINES` samples of 12 to 40 tokens, so that some may be checked again."""
    draw = np.random.default_rng(3)
    lines = []
    for number in range(NUM_LINES):
        n = int(draw.integers(12, 41))
        lines.append(
            {"id": number, "input_ids": draw.integers(6, 262, n).tolist(), "loss_mask": [0] * 4 + [1] * (n - 4)}
        )
    return make_data(lines, case_target())


def filled(config: ExtractConfig, target: HfTarget, order: Callable[[list[Any]], list[Any]] = list) -> Any:
    """Records every group in the given order; gives the commits, the plan and what the recorder told."""
    found = survey(config)
    create_store(found.store_dir, found.manifest, found.plan.table, Path(config.data))
    dealer = Dealer(found, set())
    filler = SegmentFiller(found.store_dir, found.manifest, lambda _: None)
    ours, theirs = Pipe()
    recorder = Recorder(Channel(theirs, "here"), dealer.order("cpu"), found.manifest, target)
    told: list[Any] = []
    for group in order(dealer.groups):
        recorder.record(group, Inline(filler))
        while ours.poll():
            told.append(ours.recv()[1])
    filler.close()
    return read_commits(found.store_dir, found.manifest.identity_sha256).table, recorder, told


def spoil_later_batches(target: HfTarget) -> Any:
    """Every forward of several samples after the first one gives states that are off by 3e-4 in layer 1."""
    seen = [0]

    def perturb(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[0] == 1:
            return output
        seen[0] += 1
        return output if seen[0] <= 2 else output * 1.0003  # the check of the set-up runs the first batch once more

    return target.decoder.layers[1].register_forward_hook(perturb)


@pytest.mark.parametrize("last", [False, True])
def test_a_true_target_passes_every_check(
    many: Path, tmp_path: Path, case_target: Any, make_config: MakeConfig, last: bool
) -> None:
    commits, recorder, told = filled(make_config(many, tmp_path / "s", last=last), load_target(str(case_target())))
    checks = [message for message in told if isinstance(message, CheckedAgain)]
    assert set(commits.column("status").to_pylist()) == {STATUS_OK}
    assert len(checks) == recorder.is_chosen_again.sum() > 1
    assert not any(check.has_failed for check in checks)
    assert 0 < sum(check.num_tokens for check in checks) <= SHARE * recorder.lengths.sum()


def test_a_target_that_goes_wrong_after_the_first_batch_is_found_marked_and_counted(
    many: Path, tmp_path: Path, case_target: Any, make_config: MakeConfig
) -> None:
    """The same samples are marked whatever the order of the groups, so whoever takes them."""
    marked = []
    for name, order in (("a", list), ("b", lambda groups: [groups[0], *groups[:0:-1]])):
        target = load_target(str(case_target()))
        handle = spoil_later_batches(target)
        commits, recorder, told = filled(make_config(many, tmp_path / name), target, order)
        handle.remove()
        checks = [message for message in told if isinstance(message, CheckedAgain)]
        failed = commits.filter(np.equal(commits.column("status").to_numpy(), STATUS_FAILED))
        assert 1 < sum(check.has_failed for check in checks) == failed.num_rows
        chosen = recorder.plan["sample_id"][recorder.is_chosen_again]
        assert set(failed.column("sample_id").to_pylist()) <= set(chosen.tolist())
        notes = [message.text for message in told if isinstance(message, Note)]
        assert len(notes) == 1
        assert "tap 1 of a sample differs between its batch and the sample alone: relative error 0.0003" in notes[0]
        marked.append(failed.column("sample_id").to_pylist())
    assert marked[0] == marked[1]


def test_a_wrong_last_state_is_found_by_the_head(
    many: Path, tmp_path: Path, case_target: Any, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the tolerance of the comparison alone, the head still tells: made so by a tolerance that lets all pass."""
    from dflash_offline.extract import soundness

    monkeypatch.setitem(soundness.TOLERANCE, "float32", 1e9)
    target = load_target(str(case_target()))
    seen = [0]

    def turned(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen[0] += output.shape[0] > 1
        return output if seen[0] <= 2 or output.shape[0] == 1 else output.flip(-1)

    handle = target.decoder.layers[-1].register_forward_hook(turned)
    commits, _, told = filled(make_config(many, tmp_path / "s", last=True), target)
    handle.remove()
    notes = [message.text for message in told if isinstance(message, Note)]
    assert len(notes) == 1
    assert "the head of the normed last state names another top token" in notes[0]
    assert STATUS_FAILED in commits.column("status").to_pylist()


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_keeps_to_its_share_and_to_the_content(seed: int) -> None:
    draw = np.random.default_rng(seed)
    content = np.sort(draw.integers(0, 2**64, 4000, dtype=np.uint64))  # as a plan has them
    lengths = np.maximum(1, draw.lognormal(6, 1.2, 4000).astype(np.int64))
    chosen = chosen_again(content, lengths)
    total = int(lengths.sum())
    assert 0.5 * SHARE * total < lengths[chosen].sum() <= SHARE * total
    mixed = draw.permutation(4000)
    assert set(content[mixed][chosen_again(content[mixed], lengths[mixed])]) == set(content[chosen])
    places = np.flatnonzero(chosen) / 4000
    assert (places < 0.5).any()
    assert (places > 0.5).any()


def test_few_samples_are_never_checked_beyond_the_share() -> None:
    assert not chosen_again(np.arange(3, dtype=np.uint64), np.array([50, 60, 70])).any()
    assert not chosen_again(np.zeros(0, np.uint64), np.zeros(0, np.int64)).any()
    lengths = np.array([5000, *[1] * 600])
    chosen = chosen_again(np.arange(601, dtype=np.uint64), lengths)
    assert not chosen[0], "longer than the whole share"
    assert chosen.sum() == 28


def test_the_report_says_what_was_checked_again_and_the_store_does_not_depend_on_the_shards(
    many: Path, tmp_path: Path, make_config: MakeConfig, content: Callable[[Path], dict[str, str]]
) -> None:
    one = extract(make_config(many, tmp_path / "one"))
    three = extract(make_config(many, tmp_path / "three", shards=3))
    assert one.num_checked_again == three.num_checked_again > 1
    assert 0 < one.num_checked_tokens == three.num_checked_tokens
    assert one.num_checks_failed == three.num_checks_failed == 0
    said = f"again, alone: {one.num_checked_again} samples, {one.num_checked_tokens} tokens; 0 of them failed"
    assert said in one.text()
    assert content(tmp_path / "one") == content(tmp_path / "three")
    assert "checked " not in extract(make_config(many, tmp_path / "one")).text(), "nothing was recorded"
