"""Stores that leave out what lies further before the first anchor than a window: made, recoded, verified, told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.config import RecodeConfig
from dflash_offline.store.create import create_store
from dflash_offline.store.index import commit_path, read_plan
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import read_manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.recode import RecodeReport, recode
from dflash_offline.store.repair import repair
from dflash_offline.store.samples import SampleTable
from dflash_offline.store.state_error import measured_error
from dflash_offline.store.summary import describe_store, read_facts

NUM_SAMPLES, WINDOW = 24, 20
MakeStore = Callable[..., Path]
Recode = Callable[..., tuple[Path, RecodeReport]]


@pytest.fixture(scope="module")
def store_of(lab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> MakeStore:
    """store_of(20): the same samples, each with a prompt, recorded with that window (None: whole); read it only."""
    made: dict[int | None, Path] = {}

    def make(window: int | None) -> Path:
        if window not in made:
            folder = tmp_path_factory.mktemp("stored")
            made[window] = lab.make_store(folder, range(NUM_SAMPLES), has_prompts=True, window=window)
        return made[window]

    return make


@pytest.fixture
def made(tmp_path: Path) -> Recode:
    """made(store, ..., name="out", window=10): recodes into tmp_path/NAME with one worker."""

    def make(*stores: Path, name: str = "out", **settings: Any) -> tuple[Path, RecodeReport]:
        config = RecodeConfig(**({"out": str(tmp_path / name), "workers": 1} | settings))
        return tmp_path / name, recode(config, [str(store) for store in stores])

    return make


def states_of(store: Path) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
    """Taps [Lt, n, H] and last state [n, H] as bits, and the first recorded token, of each sample by its number."""
    found = {}
    with StoreReader(store) as reader:
        manifest, samples = reader.manifest, reader.samples
        for i, number in enumerate(samples.source_line.tolist()):
            n = int(samples.n[i])
            planes = np.empty((len(manifest.tap_layers), n, manifest.hidden_size), dtype=np.uint16)
            reader.read(i, planes)
            last = np.empty((n, manifest.hidden_size), dtype=np.uint16)
            reader.read_last(i, last)
            found[number] = (planes, last, int(samples.first[i]))
    return found


def segments_of(store: Path) -> dict[str, bytes]:
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for p in store.glob("*/c.*.0.0")}


def test_a_recode_with_a_window_holds_the_last_part_of_each_sample(store_of: MakeStore, made: Recode) -> None:
    out, report = made(store_of(None), window=WINDOW)
    whole, cut = states_of(store_of(None)), states_of(out)
    table = SampleTable(out / "plan")
    assert cut.keys() == whole.keys()
    for row, number in enumerate(table.column("source_line").tolist()):
        mask = table.tokens(row)[1]
        anchor = next(a for a in range(len(mask)) if mask[a] and mask[a + 1])
        (planes, last, first), (all_planes, all_last, _) = cut[number], whole[number]
        assert first == max(0, anchor - WINDOW)
        assert np.array_equal(planes, all_planes[:, first:])
        assert np.array_equal(last, all_last[first:])
    assert sum(first > 0 for _, _, first in cut.values()) > NUM_SAMPLES // 2
    assert not verify(out).faults
    assert (read_manifest(out).window, read_manifest(store_of(None)).window) == (WINDOW, None)
    assert report.num_positions == sum(planes.shape[1] for planes, _, _ in cut.values())
    assert report.positions_before == sum(planes.shape[1] for planes, _, _ in whole.values())
    assert report.bytes_after < 0.7 * report.bytes_before


@pytest.mark.parametrize("codec", ["raw", "int8:4"])
def test_cut_in_two_steps_or_one_it_is_the_same_store(store_of: MakeStore, made: Recode, codec: str) -> None:
    """Also where states are encoded on the way: only what is kept is encoded and measured."""
    whole = store_of(None)
    at_once, _ = made(whole, name="once", window=8, codec=codec)
    first, _ = made(whole, name="first", window=WINDOW)
    second, report = made(first, name="second", window=8, codec=codec)
    assert segments_of(second) == segments_of(at_once)
    for name in ("segment", "position", "n", "first"):
        assert read_plan(second)[name].equals(read_plan(at_once)[name])
    error = measured_error(second)
    assert (error is None) == (codec == "raw")
    assert error is None or error["num_states"] == 4 * report.num_positions
    assert read_manifest(second).data["recoded"]["sources"]["1"]["window"] == WINDOW


def test_without_the_option_a_store_keeps_its_window(store_of: MakeStore, made: Recode) -> None:
    out, _ = made(store_of(WINDOW), codec="zstd")
    assert read_manifest(out).window == WINDOW
    before, after = states_of(store_of(WINDOW)), states_of(out)
    assert all(np.array_equal(before[number][0], planes) for number, (planes, _, _) in after.items())
    assert {number: first for number, (_, _, first) in after.items()} == {k: v[2] for k, v in before.items()}
    same, _ = made(store_of(WINDOW), name="same", window=WINDOW, codec="zstd")
    assert segments_of(same) == segments_of(out)


def test_a_larger_window_is_refused_with_both_values(store_of: MakeStore, made: Recode, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"--window {WINDOW + 1} is more than the window {WINDOW} of ") as caught:
        made(store_of(WINDOW), window=WINDOW + 1)
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"window = 0"):
        made(store_of(None), window=0)


def test_stores_of_different_windows_become_one_when_asked(store_of: MakeStore, made: Recode, lab: ModuleType) -> None:
    with pytest.raises(UserError, match=r"window = null in the first, 20 in the second[\s\S]*give --window, so"):
        made(store_of(None), store_of(WINDOW))
    merged, report = made(store_of(WINDOW), store_of(None), window=10)
    alone, _ = made(store_of(None), name="alone", window=10)
    assert segments_of(merged) == segments_of(alone)
    assert report.left_out == {"in an earlier store too": NUM_SAMPLES}
    assert not verify(merged).faults


def test_verify_compares_what_is_recorded_with_masks_and_window(lab: ModuleType, tmp_path: Path) -> None:
    """A manifest that claims another window than its plan has."""
    store = lab.make_store(tmp_path, range(NUM_SAMPLES), has_prompts=True, window=WINDOW)
    assert not verify(store).faults
    plan, manifest = read_plan(store), read_manifest(store)
    other = replace(manifest, window=WINDOW + 4)
    create_store(tmp_path / "other", other, plan.replace_schema_metadata(None), tmp_path / "data")
    lab.fill_segments(tmp_path / "other", other, range(other.num_segments))
    told = [str(fault) for fault in verify(tmp_path / "other").faults if "recorded, not" in str(fault)]
    first = dict(zip(plan["sample_id"].to_pylist(), plan["first"].to_pylist()))
    assert len(told) == sum(token > 0 for token in first.values())
    sample_id = next(sample_id for sample_id, token in first.items() if token >= 4)
    expected = f"sample {sample_id} has tokens {first[sample_id]} to "
    line = next(line for line in told if expected in line)
    assert f"recorded, not tokens {first[sample_id] - 4} to " in line
    assert f"by its mask and window {WINDOW + 4}" in line


def test_a_plan_that_leaves_tokens_out_needs_a_window(lab: ModuleType, tmp_path: Path) -> None:
    store = lab.make_store(tmp_path, range(NUM_SAMPLES), has_prompts=True, window=WINDOW)
    plan = read_plan(store).replace_schema_metadata(None)
    with pytest.raises(ValueError, match="the largest first is 0, the plan has"):
        create_store(tmp_path / "other", replace(read_manifest(store), window=None), plan, tmp_path / "data")


def test_another_window_is_another_store(store_of: MakeStore, lab: ModuleType, tmp_path: Path) -> None:
    store = lab.make_store(tmp_path, range(NUM_SAMPLES), has_prompts=True)
    manifest, plan = read_manifest(store_of(WINDOW)), read_plan(store_of(WINDOW))
    with pytest.raises(UserError, match="window = null there, 20 now"):
        create_store(store, manifest, plan.replace_schema_metadata(None), tmp_path / "data")


def test_inspect_and_repair_name_the_window(store_of: MakeStore, lab: ModuleType, tmp_path: Path) -> None:
    assert "\nwindow " not in describe_store(read_facts(store_of(None)))
    store = lab.make_store(tmp_path, range(NUM_SAMPLES), has_prompts=True, window=WINDOW)
    text = describe_store(read_facts(store))
    assert f"tokens more than {WINDOW} before a sample's first eligible anchor are not stored" in text
    assert f"drafter.window up to {WINDOW}" in text
    path = commit_path(store, 0)
    path.write_bytes(path.read_bytes()[:-9])
    assert f" --window {WINDOW} " in repair(store, verify(store)).text()
