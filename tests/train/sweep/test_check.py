"""Runs that cannot be trained are refused before the first starts, all at once; nothing is written."""

import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.cli import main
from dflash_offline.store.reader import StoreReader
from dflash_offline.train import order, run
from dflash_offline.train.evaluate.walk import recorded_samples
from dflash_offline.train.order import ALL, TRAIN_SPLIT, RowOrder, samples_of
from dflash_offline.train.packing import pack_rows
from dflash_offline.train.slot import RowShape
from dflash_offline.train.sweep.check import Device, find_devices, require_all
from dflash_offline.train.sweep.sweep import absolute, config_text, planned, with_absolute_paths


def refused(lab, store: Path, out: Path, base: dict | None = None, **own) -> UserError:
    with pytest.raises(UserError) as caught:
        lab.train_here(store, out, base, **own)
    assert not out.exists()
    assert len(str(caught.value).splitlines()) == 3
    return caught.value


def test_all_that_is_wrong_is_said_in_one_message(lab, tiny_store, tmp_path):
    runs = (
        {"drafter.num_layers": 2},
        {"drafter.taps": [0, 7]},
        {"drafter.block_size": 999},
        {"drafter.block_size": 999, "seed": 2},
        {"loss.objective": "kl"},
        {"loss.gamma": 4.0, "loss.weights": "uniform"},
        {"optim.speed": 1},
        {"optim.lr": "fast"},
        {"sinks": ["no-such-sink"]},
    )
    error = refused(lab, tiny_store, tmp_path / "out", strategy="list", runs=runs)
    assert error.happened.startswith("8 of 9 runs cannot be trained: ")
    for told in (
        "run 2, drafter.taps=0,7: ",
        "runs 3, 4: drafter.block_size = 999 (expected: 2 to 128 tokens)",
        "run 5, loss.objective=kl: loss.objective = 'kl', and the store",
        "loss.gamma = 4.0 does nothing with loss.weights = 'uniform'",
        "unknown field 'optim.speed'",
        "optim.lr = 'fast' is a str",
        "sinks = 'no-such-sink'",
    ):
        assert told in error.happened, told


def test_one_fault_of_many_runs_keeps_its_advice(lab, tiny_store, tmp_path):
    error = refused(lab, tiny_store, tmp_path / "out", {"rows.anchors": 3}, fields={"seed": [1, 2]})
    assert error.happened.startswith("2 of 2 runs cannot be trained (runs 1, 2): anchors = 3")
    assert "set anchors = 16" in error.advice


@pytest.mark.parametrize("name", ["store", "out", "devices", "stop_at"])
def test_the_base_may_not_say_what_the_sweep_says(lab, tiny_store, tmp_path, name):
    error = refused(lab, tiny_store, tmp_path / "out", {name: "x"}, fields={"seed": [1, 2]})
    assert f"[train] says {name} = 'x'" in error.happened


def test_rungs_lie_before_the_end_and_need_held_out_samples(lab, runs_lab, tiny_store, tmp_path):
    halving: dict[str, Any] = {"halving.steps": (4, 12)}
    error = refused(lab, tiny_store, tmp_path / "out", fields={"seed": [1, 2]}, **halving)
    assert "halving.steps = [4, 12], and the run has 12 steps" in error.happened
    store = runs_lab.make_store(tmp_path / "s", num_held_out=0)
    assert "holds no held-out sample" in refused(lab, store, tmp_path / "out", fields={"seed": [1, 2]}).happened


@pytest.mark.parametrize(
    "name, values",
    [
        ("eval_samples", [1, 5]),
        ("steps", [12, 24]),
        ("rows.rows_per_step", [1, 8]),
        ("rows.row_tokens", [128, 256]),
        ("rows.anchors", [16, 32]),
        ("optim.decay_share", [0.2, 0.6]),
        ("optim.final_share", [0.02, 0.1]),
        ("optim.schedule", ["wsd", "cosine"]),
    ],
)
def test_rungs_compare_no_runs_of_unlike_steps_or_exams(lab, tiny_store, tmp_path, name, values):
    halving: dict[str, Any] = {"halving.steps": (4,)}
    error = refused(lab, tiny_store, tmp_path / "out", fields={name: values, "seed": [1, 2]}, **halving)
    assert f"the runs differ in {name} (" in error.happened
    assert "halving.steps = [4]" in error.happened
    planned(lab.config_of(tiny_store, tmp_path / "out", fields={name: values[:1], "seed": [1, 2]}, **halving), lab.base)
    planned(lab.config_of(tiny_store, tmp_path / "out", fields={name: values, "seed": [1, 2]}), lab.base)


def test_steps_of_some_runs_and_epochs_of_others_are_unlike_too(lab, tiny_store, tmp_path):
    own: dict[str, Any] = {"strategy": "list", "runs": ({"steps": 12}, {"epochs": 2.0}), "halving.steps": (4,)}
    config = lab.config_of(tiny_store, tmp_path / "out", **own)
    with pytest.raises(UserError, match=r"the runs differ in steps \(.*\), epochs \("):
        planned(config, {})


@pytest.mark.parametrize("place", ["mine", "runs/mine"])
def test_a_folder_inside_of_the_store_is_refused(lab, tiny_store, tmp_path, place):
    (tmp_path / "link").symlink_to(tiny_store)
    before = sorted(tiny_store.rglob("*"))
    with pytest.raises(UserError, match="lies inside of the store") as caught:
        lab.train_here(tiny_store, tmp_path / "link" / place, fields={"seed": [1, 2]})
    assert len(str(caught.value).splitlines()) == 3
    assert sorted(tiny_store.rglob("*")) == before


def test_the_folder_of_first_weights_is_noted_so_that_any_folder_finds_it(lab, tiny_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inits = ["export", "none", "/elsewhere"]
    meant = [str(tmp_path / "export"), "none", "/elsewhere"]
    config = with_absolute_paths(lab.config_of(tiny_store, tmp_path / "out", fields={"drafter.init": inits}))
    known = planned(config, absolute({"drafter.init": "export", "steps": 4}))
    assert [run.overrides["drafter.init"] for run in known.runs] == meant
    assert known.base == {"drafter.init": meant[0], "steps": 4}
    written = tomllib.loads(config_text(config, known))
    assert written["sweep"]["fields"]["drafter.init"] == meant
    runs = tuple({"drafter": {"init": init}} for init in inits)
    config = with_absolute_paths(lab.config_of(tiny_store, tmp_path / "out", strategy="list", runs=runs))
    assert [run.overrides["drafter.init"] for run in planned(config, {}).runs] == meant


def test_runs_that_a_card_has_no_room_for_are_refused(lab, tiny_store, tmp_path):
    """The memory plan of every run, on the smallest of the cards; no card is needed to say so."""
    fields = {"drafter.intermediate_size": [64, 4096, 2**21, 2**22]}
    base = lab.base | {"drafter.head_dim": 16}
    sweep = planned(lab.config_of(tiny_store, tmp_path / "out", fields=fields), base)
    cards = [Device("cuda:0", 80 * 2**30), Device("cuda:1", 4 * 2**30)]
    with pytest.raises(UserError) as caught:
        require_all(sweep, sweep.runs, cards)
    assert caught.value.happened.startswith("2 of 4 runs cannot be trained: run 3, ")
    assert "run 4, drafter.intermediate_size=4194304: the run needs" in caught.value.happened
    require_all(sweep, sweep.runs[:2], cards)
    assert [run.steps for run in sweep.runs] == [12, 12, None, None]


def test_heads_too_narrow_for_a_card_are_refused_in_whole_sentences(lab, tiny_store, tmp_path):
    sweep = planned(lab.config_of(tiny_store, tmp_path / "out", fields={"drafter.head_dim": [8, 14, 16]}), lab.base)
    with pytest.raises(UserError) as caught:
        require_all(sweep, sweep.runs, [Device("cuda:0", 80 * 2**30)])
    assert caught.value.happened == (
        "2 of 3 runs cannot be trained: run 1, drafter.head_dim=8: drafter.head_dim = 8 on a CUDA device "
        "(expected: heads of a width of at least 16, which flex attention takes there); run 2, drafter.head_dim=14: "
        "drafter.head_dim = 14 on a CUDA device "
        "(expected: heads of a width of at least 16, which flex attention takes there)"
    )
    assert caught.value.advice == (
        "train on the CPU with --devices cpu, or a new run with --set drafter.head_dim=16 or more"
    )
    require_all(sweep, sweep.runs, [Device("cpu")])


def test_the_store_is_opened_once_and_packed_once_for_rows_that_runs_share(lab, tiny_store, tmp_path, monkeypatch):
    """12 runs have 4 kinds of rows: row tokens and seeds count, block size and learning rate do not."""
    opened, packed, searched = [], [], []

    class Counted(StoreReader):
        def __init__(self, path: Path, **options: Any) -> None:
            opened.append(path)
            super().__init__(path, **options)

        def tokens(self, i: int) -> Any:
            searched.append(i)
            return super().tokens(i)

    def pack_counted(*args: Any, **keys: Any) -> Any:
        packed.append(keys["seed"])
        return pack_rows(*args, **keys)

    monkeypatch.setattr(run, "StoreReader", Counted)
    monkeypatch.setattr(order, "pack_rows", pack_counted)
    fields = {"rows.row_tokens": [128, 256], "seed": [1, 2], "drafter.block_size": [4, 6, 8]}
    base = {name: value for name, value in lab.base.items() if name != "steps"}  # one pass: steps say how many rows
    base |= {
        "rows.anchors": 32,
        "drafter.mask_token_id": 58,
        "epochs": 1.0,
    }  # a token that every sample is searched for
    sweep = planned(lab.config_of(tiny_store, tmp_path / "out", fields=fields), base)
    require_all(sweep, sweep.runs, [Device("cpu")])
    assert len(opened) == 1
    assert sorted(packed) == [1, 1, 2, 2]
    with StoreReader(tiny_store) as reader:
        assert sorted(searched) == list(range(len(reader)))
        for record in sweep.runs:
            train = samples_of(reader, TRAIN_SPLIT, ALL)
            own = record.overrides
            shape = RowShape(row_tokens=own["rows.row_tokens"], anchors=32, block_size=own["drafter.block_size"])
            slow = RowOrder.of(reader, train, shape, seed=own["seed"], shuffle_segments=32).rows(0)
            assert record.steps == len(slow)


def test_a_folder_that_holds_something_else_is_refused(lab, tiny_store, tmp_path):
    (tmp_path / "mine.txt").write_text("mine\n")
    for out in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(UserError):
            lab.train_here(tiny_store, out, fields={"seed": [1, 2]})
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_cpu_is_known_without_asking_torch():
    assert find_devices("cpu,cpu") == [Device("cpu"), Device("cpu")]


@pytest.mark.slow
def test_a_card_that_is_not_there_is_refused(lab, tiny_store, tmp_path):
    assert "cuda:97" in refused(lab, tiny_store, tmp_path / "out", fields={"seed": [1, 2]}, devices="cuda:97").happened


@pytest.mark.parametrize(
    "line, told",
    [("", "names no field"), ("--store nowhere --set fields.seed=[1,2]", "nowhere"), ("--config no.toml", "no.toml")],
)
def test_the_command_refuses_in_three_lines(tiny_store, tmp_path, monkeypatch, capsys, line, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["sweep", "--store", str(tiny_store), *shlex.split(line)])
    assert caught.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "expected", "to do"]
    assert told in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_subset_of_the_taps_reads_only_those_bytes(tiny_store):
    """What training reads of a sample (`read_rows`) and what an exam does, counted by the system."""

    def count_read(layers: tuple[int, ...]) -> int:
        with StoreReader(tiny_store) as reader:
            numbers = range(len(reader))
            taps = [reader.manifest.tap_layers.index(layer) for layer in layers]
            list(recorded_samples(reader, [0], layers))  # opens and reads the indices
            for i in numbers:
                reader.tokens(i)
            before = bytes_read()
            for i in numbers:
                shape = (len(taps), int(reader.samples.n[i]), reader.manifest.hidden_size * 2)
                reader.read_rows(i, np.empty(shape, np.uint8), taps=taps)
            list(recorded_samples(reader, numbers, layers))
            return bytes_read() - before

    whole, *parts = [count_read(layers) for layers in ((0, 2, 3), (0,), (2, 3), (3,))]
    assert parts == pytest.approx([whole / 3, 2 * whole / 3, whole / 3], rel=0.02)


def bytes_read() -> int:
    """Bytes that this process got from read calls, of the page cache or the disk."""
    with open(f"/proc/{os.getpid()}/io") as file:
        return int(file.readline().split()[1])
