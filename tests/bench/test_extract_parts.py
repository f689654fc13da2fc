"""What the benchmarks of extract reckon with, against slow references."""

import random
from pathlib import Path

import numpy as np
from dflash_offline.extract.lines.inputs import read_lines
from dflash_offline.store.integrity import verify


def test_gaps_against_a_line_of_microseconds() -> None:
    from extract_parts.machine import gaps

    draw = random.Random(3)
    for _ in range(50):
        kernels = [(start, start + draw.randrange(1, 9)) for start in (draw.randrange(60) for _ in range(9))]
        first, last = min(start for start, _ in kernels), max(end for _, end in kernels)
        busy = [any(start <= at < end for start, end in kernels) for at in range(first, last)]
        runs = "".join("x" if is_busy else "." for is_busy in busy).split("x")
        share, longest_ms = gaps([(float(start), float(end)) for start, end in kernels])
        assert abs(share - busy.count(False) / len(busy)) < 1e-9
        assert abs(longest_ms - max(map(len, runs)) / 1e3) < 1e-9


def test_a_made_target_fills_a_store_that_verifies(tmp_path: Path) -> None:
    from extract_parts.laid_out import lay_out, write_samples
    from extract_parts.recording import Bare, recording
    from extract_parts.targets import layer_parameters, make_target

    target = make_target("tiny", "cpu")
    samples = write_samples(tmp_path / "data", 6, longest=60)
    found = lay_out(tmp_path / "store", "int8:4", target.facts, samples, ("cpu",), 256, in_one_group=True)
    bare = Bare(found, target)
    assert sum(ids.numel() for ids in bare.batches) >= int(found.plan.lengths.sum())
    bare()
    with recording(found, target) as run:
        run()
    assert len(list((tmp_path / "store" / "commits").iterdir())) == found.plan.num_segments
    assert not [fault for fault in verify(tmp_path / "store").faults if "hidden" in str(fault)]
    matrices = 4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 128  # q, o, and k, v with half the heads; gate, up, down
    assert layer_parameters(target, 2) == 2 * matrices


def test_rows_of_ids_have_the_lengths_asked_for_and_doubles(tmp_path: Path) -> None:
    from extract_start import write_rows

    num_tokens = write_rows(tmp_path / "ids", 1500, 80.0)
    lines = [line.value for line in read_lines(tmp_path / "ids")]
    lengths = [len(line["input_ids"]) for line in lines if line]
    assert (len(lines), sum(lengths)) == (1500, num_tokens)
    assert abs(np.median(lengths) / 80 - 1) < 0.1
    first, second = lines[0], lines[1]
    assert first is not None
    assert second is not None
    assert first["input_ids"].tolist() == second["input_ids"].tolist()
    assert first["loss_mask"].sum() == len(first["input_ids"]) - len(first["input_ids"]) // 3


def test_the_write_rate_leaves_nothing(tmp_path: Path) -> None:
    from extract_parts.machine import write_rate

    assert write_rate(tmp_path, 1 << 20) > 0
    assert not list(tmp_path.iterdir())
