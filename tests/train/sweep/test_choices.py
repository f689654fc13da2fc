"""Which runs a sweep has: every combination, draws that a longer sweep keeps, and what is refused."""

import itertools
import math
import re
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.settings import resolve
from dflash_offline.settings_text import as_toml
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.sweep.choices import draws, runs_of
from dflash_offline.train.sweep.config import SweepConfig


def config_of(text: str, tmp_path) -> SweepConfig:
    (tmp_path / "sweep.toml").write_text(text)
    return resolve(SweepConfig, name="sweep", file=tmp_path / "sweep.toml")


def test_a_grid_has_every_combination_of_quoted_and_nested_names(tmp_path):
    text = '[sweep.fields]\n"drafter.num_layers" = [1, 2]\noptim.lr = [1e-3, 2e-3]\ndrafter.taps = [[0, 2], "none"]\n'
    runs = runs_of(config_of(text, tmp_path))
    expected = [
        {"drafter.num_layers": layers, "optim.lr": lr, "drafter.taps": taps}
        for layers, lr, taps in itertools.product([1, 2], [1e-3, 2e-3], [[0, 2], "none"])
    ]
    assert len(runs) == 8
    assert all(run in runs for run in expected)


def test_a_list_is_taken_as_it_stands(tmp_path):
    text = (
        '[sweep]\nstrategy = "list"\n[[sweep.runs]]\nseed = 1\n[[sweep.runs]]\noptim.name = "adamw"\noptim.lr = 1e-3\n'
    )
    assert runs_of(config_of(text, tmp_path)) == [{"seed": 1}, {"optim.name": "adamw", "optim.lr": 1e-3}]


RANGES = {
    "optim.lr": {"low": 1e-4, "high": 1e-1, "scale": "log"},
    "drafter.window": {"low": 3, "high": 5, "integer": True},
    "rows.anchors": {"low": 16, "high": 256, "scale": "log", "integer": True},
    "loss.gamma": {"low": 2, "high": 9},
    "seed": [4, 5],
}


def test_draws_lie_in_their_ranges_and_do_not_depend_on_the_count():
    runs = draws(RANGES, 400, seed=3)
    assert runs[:7] == draws(RANGES, 7, seed=3)
    assert runs[:7] != draws(RANGES, 7, seed=4)
    assert all(run not in runs[:i] for i, run in enumerate(runs))
    columns = {name: [run[name] for run in runs] for name in RANGES}
    assert {*columns["drafter.window"]} == {3, 4, 5}
    assert {*columns["seed"]} == {4, 5}
    assert all(isinstance(value, int) and 16 <= value <= 256 for value in columns["rows.anchors"])
    assert all(1e-4 <= value <= 1e-1 for value in columns["optim.lr"])
    assert all(2 <= value <= 9 and isinstance(value, float) for value in columns["loss.gamma"])
    thirds = [sum(10**-k <= value < 10 ** (1 - k) for value in columns["optim.lr"]) for k in (4, 3, 2)]
    assert min(thirds) > 100, "a logarithmic range has as many draws in every decade"
    assert abs(sum(columns["loss.gamma"]) / 400 - 5.5) < 0.5
    assert all(value == float(f"{value:.4g}") for value in columns["optim.lr"])
    assert abs(math.log(sorted(columns["rows.anchors"])[200]) - math.log(64)) < 0.4


def test_draws_do_not_depend_on_the_order_of_the_fields():
    assert draws(dict(reversed(RANGES.items())), 50, seed=3) == draws(RANGES, 50, seed=3)


RANGE = "{ low = 1e-3, high = 1e-1, scale = 'log' }"


@pytest.mark.parametrize(
    "text",
    [
        f"loss.weights = ['decay', 'uniform']\noptim.lr = {RANGE}\noptim.warmup_share = [0.0, 0.1]\nseed = [1, 2]",
        f"optim.lr = {RANGE}\nnoise = [0.0, 0.1]\ndrafter.num_layers = {{low = 1, high = 6, integer = true}}",
    ],
)
@pytest.mark.parametrize("strategy", ["random", "grid"])
def test_what_a_sweep_saves_has_the_same_runs_in_the_same_order(tmp_path, text, strategy):
    """Tables stand behind lists in a file that TOML's rules order; a sweep goes on with its own file."""
    text = text if strategy == "random" else re.sub(r"\{.*?\}", "[1, 2, 3]", text)
    count = "count = 12\n" if strategy == "random" else ""
    config = config_of(f"[sweep]\nstrategy = '{strategy}'\n{count}[sweep.fields]\n{text}\n", tmp_path)
    (tmp_path / "sweep.toml").write_text(as_toml(config, "sweep"))
    again = resolve(SweepConfig, name="sweep", file=tmp_path / "sweep.toml")
    assert [list(run.items()) for run in runs_of(again)] == [list(run.items()) for run in runs_of(config)]


def test_draws_end_where_no_combination_is_left():
    assert sorted(run["seed"] for run in draws({"seed": [1, 2, 3]}, 3, seed=0)) == [1, 2, 3]
    with pytest.raises(UserError, match="after 3 runs 1000 draws gave none that was new"):
        draws({"seed": [1, 2, 3]}, 4, seed=0)


@pytest.mark.parametrize(
    "text, told",
    [
        ("", ["names no field of train"]),
        ('[sweep]\nstrategy = "list"\n', ["names no run"]),
        ('[sweep]\nstrategy = "list"\n[[sweep.runs]]\nseed=1\n[[sweep.runs]]\nseed=1\n', ["runs 1 and 2 are the same"]),
        ("[sweep.fields]\nseed = []\noptim.lr = 0.1\n", ["seed = [] has no value", "optim.lr = 0.1 is no list"]),
        ("[sweep.fields]\nseed = [1, 2, 1]\nout = ['a']\n", ["seed has 1 twice", "say it with --out"]),
        ("[sweep.fields]\nseed = {low = 1, high = 2}\n", ["seed: a range needs strategy = 'random'"]),
        (
            "[sweep]\nstrategy = 'random'\n[sweep.fields]\nseed = {low = 2, high = 1, step = 1}\n"
            "optim.lr = {low = 0, high = 1, scale = 'log'}\nloss.gamma = {low = 0.5, high = 2, integer = true}\n"
            "stop_at = {low = 1, high = 5, scale = 'exp'}\n",
            ["has no 'step'", "no two rising", "no start of a logarithmic", "not whole", "[sweep.halving]", "'exp'"],
        ),
    ],
)
def test_everything_wrong_with_the_fields_is_said_at_once(tmp_path, text, told):
    with pytest.raises(UserError) as caught:
        runs_of(config_of(text, tmp_path))
    assert len(str(caught.value).splitlines()) == 3
    assert [part for part in told if part not in caught.value.happened] == []


@pytest.mark.parametrize(
    "text, told",
    [
        ("strategy = 'all'", "strategy = 'all'"),
        ("count = 3", "count = 3 does nothing with strategy = 'grid'"),
        ("strategy = 'list'\nfields.seed = [1]", "does nothing with strategy = 'list'"),
        ("runs = [{seed = 1}]", "does nothing with strategy = 'grid'"),
        ("target = 'tiny'", "does nothing without --confirm"),
        ("halving.steps = [3, 3]", "halving.steps"),
        ("halving.keep = 1.0", "halving.keep"),
        ("confirm = -1", "confirm"),
        ("devices = 'gpu'", "gpu"),
        ("rungs = 3", "unknown field 'rungs'"),
    ],
)
def test_a_setting_that_is_wrong_or_idle_is_refused(tmp_path, text, told):
    with pytest.raises(UserError) as caught:
        config_of(f"[sweep]\n{text}\n", tmp_path)
    assert told in str(caught.value)


def test_the_files_of_the_page_are_taken(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "sweeps.md").read_text()
    texts = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(texts) >= 5
    counts = [len(runs_of(config_of(text, tmp_path))) for text in texts if "fields]" in text or "runs]]" in text]
    assert counts == [8, 20, 2, 4]
    for text in texts:
        config_of(text, tmp_path)
        resolve(TrainConfig, name="train", file=tmp_path / "sweep.toml")


@pytest.mark.parametrize(
    "text, told",
    [
        ('drafter.taps = ["0,1", [0, 1]]', "drafter.taps has [0, 1] twice: '0,1' means the same"),
        (
            'drafter.layer_types = [["2xfull"], "full, full_attention"]',
            "drafter.layer_types has 'full, full_attention' twice: ['2xfull'] means the same",
        ),
        ('drafter.layer_types = [["full"], "full"]', "drafter.layer_types has 'full' twice: ['full'] means the same"),
        ("optim.lr = [1, 1.0]", "optim.lr has 1.0 twice: 1 means the same"),
        ("seed = [1, 1]", "seed has 1 twice"),
    ],
)
def test_values_that_mean_the_same_are_refused(tmp_path, text, told):
    with pytest.raises(UserError) as caught:
        runs_of(config_of(f"[sweep.fields]\n{text}\n", tmp_path))
    assert caught.value.happened == told


@pytest.mark.parametrize(
    "text", ["drafter.taps = [[0, 1], [1, 0]]", 'drafter.causal = ["no", "all"]', "noise = [0, 1]"]
)
def test_values_that_mean_two_things_are_taken(tmp_path, text):
    assert len(runs_of(config_of(f"[sweep.fields]\n{text}\n", tmp_path))) == 2


def test_runs_of_a_list_that_mean_the_same_are_refused(tmp_path):
    text = '[sweep]\nstrategy = "list"\n[[sweep.runs]]\ndrafter.taps = "0,1"\n[[sweep.runs]]\ndrafter.taps = [0, 1]\n'
    with pytest.raises(UserError, match="runs 1 and 2 are the same"):
        runs_of(config_of(text, tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        '[sweep.fields]\n"optim.lr" = [0.5]\noptim.lr = [0.003]\n',
        '[sweep]\nstrategy = "list"\n[[sweep.runs]]\n"optim.lr" = 0.5\noptim.lr = 0.003\n',
    ],
)
def test_a_field_that_is_written_twice_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="optim.lr is written twice: .*0.5.* and .*0.003"):
        runs_of(config_of(text, tmp_path))
