"""The benchmark of a sweep: which steps it compares, what it says of a ranking, and a tiny run of it all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("sweep.py")
NAMES = {"concurrent_cost", "runs", "winner_acceptance"}


def test_only_steps_that_both_runs_ended_beside_each_other_count() -> None:
    from sweep_parts.concurrent import Watched

    watched = Watched([Path("a"), Path("b")], [(0, 0), (3, 0), (9, 1), (15, 6), (18, 9), (20, 12), (20, 20)])
    assert watched.steps_together(20, 5) == [range(16, 19), range(7, 10)]
    assert watched.steps_together(20, 10) == [range(0), range(0)]


def test_updates_are_counted_in_a_file_that_grows(tmp_path: Path) -> None:
    from sweep_parts.concurrent import Watched

    path = tmp_path / "metrics.jsonl"
    watched = Watched([path])
    watched.look()
    for kind in ("exam", "train", "train", "exam"):
        with path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": 0}) + "\n")
        watched.look()
    assert watched.looks == [(0,), (0,), (1,), (2,), (2,)]


def test_the_cost_is_that_of_the_same_steps() -> None:
    from sweep_parts.concurrent import pair_of

    def lines(*times: float) -> list[dict[str, Any]]:
        return [{"step": step, "step_s": time, "wait_s": time / 10} for step, time in enumerate(times, start=1)]

    pair = pair_of(lines(9, 9, 1, 1, 2, 2, 9), lines(9, 9, 2, 3, 3, 3, 9), range(3, 7))
    assert (pair.alone_s, pair.together_s, pair.num_steps) == (1.5, 3, 4)
    assert pair.cost == pytest.approx(1.0)
    assert pair.drift == pytest.approx(1.0)
    assert pair.wait_alone == pytest.approx(0.1)


def content_of(*lengths: float | None) -> dict[str, Any]:
    """A sweep.json of runs that ended with these acceptance lengths, or failed."""
    runs = []
    for number, length in enumerate(lengths, start=1):
        results = None
        if length is not None:
            results = {"acceptance_length": length, "acceptance_length_cycles": length, "num_prompts": 8}
            results |= {"intervals": {"acceptance_length": [length - 0.5, length + 0.5]}}
            results |= {"draft_s": 0.002, "train_s": 10.0}
        state = "failed" if length is None else "finished"
        overrides = {"drafter.block_size": 8 * number, "optim.name": "muon"}
        runs.append({"number": number, "overrides": overrides, "state": state, "step": 5, "results": results})
    ranking = sorted((i + 1 for i, length in enumerate(lengths) if length), key=lambda i: -(lengths[i - 1] or 0))
    effects = [{"field": "optim.name", "share": 0.25}, {"field": "drafter.block_size", "share": None}]
    fields = ["drafter.block_size", "optim.name"]
    return {"fields": fields, "runs": runs, "ranking": ranking, "effects": effects}


def test_rows_and_table_are_those_of_the_ranking() -> None:
    from sweep_parts.grid import part_of, table_of

    content = content_of(2.0, 3.0, None)
    values = {name: value for name, (value, _) in part_of(content).values.items()}
    assert (values["runs"], values["winner_acceptance"], values["winner_acceptance_low"]) == (2, 3.0, 2.5)
    assert (values["acceptance_8_muon"], values["acceptance_16_muon"], values["train_time"]) == (2.0, 3.0, 20.0)
    assert values["variance_of_optim"] == 0.25
    assert "variance_of_block_size" not in values
    table = table_of(content)
    assert table[2] == "| 1 | 16 | muon | 3.000 | 2.500 to 3.500 | 3.000 | 2.00 | 10 |"
    assert table[-1] == "not ranked: 24_muon, failed at step 5"
    with pytest.raises(SystemExit, match="no run"):
        part_of(content_of(None))


def test_a_part_that_was_not_run_is_named() -> None:
    from step_parts.table import Part
    from sweep import BARS, merged

    part = Part("concurrent", {"x": (1.0, "s"), "concurrent_cost": (0.02, "ratio")})
    rows, left_out = merged([part], BARS)
    assert [(row.name, row.verdict) for row in rows] == [("concurrent_cost", "PASS"), ("x", "")]
    assert set(left_out) == NAMES - {"concurrent_cost"}


@pytest.mark.slow
def test_the_benchmark_runs_in_small(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(tmp_path), "--part", "concurrent"]
    done = subprocess.run([*command, "--part", "smollm2"], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["bench"] == "sweep"
    values = {row["name"]: row["value"] for row in last["rows"]}
    assert set(values) >= NAMES
    assert values["runs"] == 12
    assert values["winner_acceptance"] >= 1
    assert values["concurrent_step_alone_0"] > 0
    merged = subprocess.run([sys.executable, str(SCRIPT), "--merge", str(tmp_path)], capture_output=True, text=True)
    assert merged.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
