"""The example of docs/sweeps.md, typed as it stands there: its table comes out again."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "sweeps.md"
ROUNDED = 0.02  # another processor rounds otherwise, and 120 steps carry that on


@pytest.mark.slow
def test_the_example_of_the_page_comes_out_again(tmp_path):
    example = PAGE.read_text().partition("## An example\n")[2].partition("\n## ")[0]
    (file,) = re.findall(r"```toml\n(.*?)```", example, re.DOTALL)
    (tmp_path / "sweep.toml").write_text(file)
    lines = re.findall(r"^dflash (.*)$", example, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["demo", "sweep"]
    for line in lines:
        command = [sys.executable, "-m", "dflash_offline.cli", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "demo/sweep/sweep.json").read_text())
    runs = {run["number"]: run for run in content["runs"]}
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| \d.*$", example, re.MULTILINE)]
    assert [int(row[1]) for row in rows] == content["ranking"]
    for _rank, number, settings, length, interval, cycles, parameters in rows:
        run = runs[int(number)]
        assert settings.strip("`") == ", ".join(f"{name}={value:g}" for name, value in run["overrides"].items())
        found = run["results"] or run["rungs"][-1]
        assert found["acceptance_length"] == pytest.approx(float(length.split()[0]), rel=ROUNDED)
        assert found["acceptance_length_cycles"] == pytest.approx(float(cycles), rel=ROUNDED)
        if interval:
            bounds = [float(bound) for bound in interval.split(" to ")]
            assert found["intervals"]["acceptance_length"] == pytest.approx(bounds, rel=ROUNDED)
            assert f"{found['num_parameters']:,}" == parameters
        else:
            assert run["state"] == "out"
    shares = [100 * effect["share"] for effect in content["effects"]]
    told = re.search(r"learning rate explains (\d+) %.*?layers (\d+) %", example, re.DOTALL)
    assert told is not None
    assert shares == pytest.approx([float(share) for share in told.groups()], abs=2.0)
    decoded = runs[content["ranking"][0]]["decoded"]
    assert decoded["num_equal"] == decoded["num_prompts"] == 32
    assert decoded["acceptance_length"] == pytest.approx(runs[4]["results"]["acceptance_length"])
