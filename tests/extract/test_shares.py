"""Which segments a budget and a launcher's shards take: against counting them one by one."""

from pathlib import Path

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.extract.plan import Plan, make_groups, make_plan
from dflash_offline.extract.shares import joined, num_fitting, own_groups
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.samples import SampleTable, SampleWriter

HIDDEN, TAPS = 32, (0, 1)


def some_plan(folder: Path, count: int = 40) -> tuple[Plan, Manifest]:
    draw = np.random.default_rng(3)
    with SampleWriter(folder) as writer:
        for line in range(count):
            ids = draw.integers(6, 262, int(draw.integers(3, 200)))
            writer.add(ids, np.ones(len(ids)), split="train", task="", source="a", source_line=line)
    plan = make_plan(SampleTable(folder), bytes_per_position=2.0 * HIDDEN * len(TAPS))
    manifest = Manifest(
        target={},
        data={},
        tap_layers=TAPS,
        hidden_size=HIDDEN,
        has_last=True,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        num_samples=plan.num_samples,
        num_positions=plan.num_positions,
        plan_sha256=plan.sha256,
    )
    return plan, manifest


def slow_bytes(plan: Plan, num_segments: int) -> int:
    """Bytes of the first segments of raw states, tap by tap and chunk by chunk (docs/store-format.md, section 5)."""
    total = 0
    for segment in range(num_segments):
        for planes in (len(TAPS), 1):  # hidden, last
            chunks = sum(-(-n // 64) for s, n in zip(plan.column("segment"), plan.column("n")) if s == segment)
            total += int(chunks) * planes * (64 * HIDDEN * 2 + 4)
            total += plan.segment_positions // 64 * planes * 16 + 4
    return total


def test_a_budget_takes_the_first_segments_that_fit_and_a_larger_one_more(tmp_path: Path) -> None:
    plan, manifest = some_plan(tmp_path)
    assert plan.num_segments > 10
    before = 0
    for budget in range(slow_bytes(plan, 1), slow_bytes(plan, plan.num_segments) + 20_000, 7_919):
        count = num_fitting(plan, manifest, str(budget))
        assert slow_bytes(plan, count) <= budget
        assert count == plan.num_segments or slow_bytes(plan, count + 1) > budget
        assert count >= before
        before = count
    assert before == plan.num_segments == num_fitting(plan, manifest, None)


def test_a_budget_below_the_first_segment_is_refused(tmp_path: Path) -> None:
    plan, manifest = some_plan(tmp_path)
    least = slow_bytes(plan, 1)
    with pytest.raises(UserError, match=rf"budget = '{least - 1}' holds no segment.*{least} bytes") as caught:
        num_fitting(plan, manifest, str(least - 1))
    assert len(str(caught.value).splitlines()) == 3
    assert num_fitting(plan, manifest, str(least)) == 1


@pytest.mark.parametrize("num_segments, num_asked", [(64, 64), (64, 30), (90_000, 90_000), (3, 3), (90_000, 1)])
@pytest.mark.parametrize("shards", [1, 6, 48])
def test_every_group_belongs_to_one_shard(num_segments: int, num_asked: int, shards: int) -> None:
    shares = [own_groups(num_segments, num_asked, shards, (shard,)) for shard in range(shards)]
    everything = own_groups(num_segments, num_asked, shards, None)
    assert [group for share in shares for group in share] == everything
    assert everything == [group for group in make_groups(num_segments) if group.start < num_asked]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert own_groups(num_segments, num_asked, shards, tuple(range(shards))) == everything


def test_groups_are_joined_to_few_ranges_up_to_what_is_asked() -> None:
    groups = [range(8, 12), range(0, 4), range(4, 8), range(16, 20)]
    assert joined(groups, 18) == [range(0, 12), range(16, 18)]
    assert joined([], 5) == []
