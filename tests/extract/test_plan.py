"""The plan: pure, every sample once, in the order of its content."""

from pathlib import Path

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.extract.plan import Plan, make_groups, make_plan
from dflash_offline.store.index import check_plan
from dflash_offline.store.samples import SampleTable, SampleWriter


def write_samples(folder: Path, lengths: list[int], *, rows_per_file: int = 3) -> SampleTable:
    """One sample per length n, with n recorded positions: the answer starts at token 0."""
    with SampleWriter(folder, rows_per_file=rows_per_file) as writer:
        for line, n in enumerate(lengths):
            ids = [line % 7, *range(n)] if n else [1, 2]
            mask = [1] * len(ids) if n else [0, 0]
            split = "heldout" if line % 4 == 0 else "train"
            writer.add(ids, mask, split=split, task=f"t{line % 3}", source="a.jsonl", source_line=line)
    return SampleTable(folder)


def rows(plan: Plan) -> list[tuple[int, int, int, int]]:
    return list(zip(*(plan.column(name).tolist() for name in ("sample_id", "segment", "position", "n"))))


def test_plan_holds_every_sample_once_with_its_facts(tmp_path: Path) -> None:
    lengths = [5, 64, 65, 200, 1, 130, 64, 90]
    samples = write_samples(tmp_path, lengths)
    plan = make_plan(samples, bytes_per_position=100.0, segment_positions=256)
    check_plan(plan.table, 256, plan.num_segments)
    assert sorted(plan.column("sample_id").tolist()) == list(range(8))
    assert plan.num_positions == sum(lengths)
    for at, row in enumerate(plan.column("sample_id").tolist()):
        assert plan.column("n")[at] == lengths[row]
        file, inside = plan.column("tokens_file")[at], plan.column("tokens_row")[at]
        assert samples.tokens_at(file, inside)[0].tolist() == samples.tokens(row)[0].tolist()
        assert plan.column("source_line")[at] == row
        assert plan.table.column("split")[at].as_py() == ("heldout" if row % 4 == 0 else "train")
        assert plan.table.column("task")[at].as_py() == f"t{row % 3}"


def test_order_is_by_content_then_row(tmp_path: Path) -> None:
    """The same samples in other files and another order lie in the same places."""
    lengths = [5, 64, 65, 200, 1, 130]
    one = make_plan(write_samples(tmp_path / "a", lengths, rows_per_file=2), bytes_per_position=100.0)
    two = make_plan(write_samples(tmp_path / "b", lengths, rows_per_file=50), bytes_per_position=100.0)
    assert rows(one) == rows(two)
    content = write_samples(tmp_path / "c", lengths).column("content")
    assert one.column("sample_id").tolist() == np.argsort(content).tolist()
    with SampleWriter(tmp_path / "d") as writer:
        for line in range(3):
            writer.add([1, 2, 3], [1, 1, 1], split="train", task="", source="", source_line=line)
    same = make_plan(SampleTable(tmp_path / "d"), bytes_per_position=100.0)
    assert same.column("sample_id").tolist() == [0, 1, 2]


def test_plan_is_pure_and_its_hash_sees_every_change(tmp_path: Path) -> None:
    samples = write_samples(tmp_path, [5, 64, 65, 200])
    plan = make_plan(samples, bytes_per_position=100.0)
    assert plan.sha256 == make_plan(SampleTable(tmp_path), bytes_per_position=100.0).sha256
    assert plan.sha256 != make_plan(samples, bytes_per_position=100.0, segment_positions=1024).sha256
    other = write_samples(tmp_path / "other", [5, 64, 65, 201])
    assert plan.sha256 != make_plan(other, bytes_per_position=100.0).sha256


def test_samples_without_an_anchor_are_counted_not_planned(tmp_path: Path) -> None:
    plan = make_plan(write_samples(tmp_path, [0, 7, 0]), bytes_per_position=100.0)
    assert (plan.num_samples, plan.num_without_anchor) == (1, 2)
    empty = make_plan(write_samples(tmp_path / "none", []), bytes_per_position=100.0)
    assert (empty.num_samples, empty.num_segments, empty.num_positions) == (0, 0, 0)
    check_plan(empty.table, empty.segment_positions, 0)


def test_asked_segment_below_the_longest_sample_is_refused(tmp_path: Path) -> None:
    samples = write_samples(tmp_path, [5, 130])
    with pytest.raises(UserError, match=r"segment_positions = 128 .* longest sample, 192 positions[\s\S]*256"):
        make_plan(samples, bytes_per_position=100.0, segment_positions=128)
    assert make_plan(samples, bytes_per_position=100.0, segment_positions=256).num_segments == 1


@pytest.mark.parametrize("num_segments, size", [(0, 1), (1, 1), (2, 1), (31, 1), (64, 4), (512, 32), (90_000, 32)])
def test_groups_cover_all_segments_and_give_two_workers_something(num_segments: int, size: int) -> None:
    groups = make_groups(num_segments)
    assert [segment for group in groups for segment in group] == list(range(num_segments))
    assert all(len(group) <= size for group in groups)
    assert len(groups) >= min(num_segments, 16)
