"""Extraction with each codec, against the states of the raw store encoded by the numpy reference."""

import shutil
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.foretell import plan_command
from dflash_offline.extract.launch import Dealer, extract, report
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.summary import ExtractReport, PlanSummary
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.store import int8
from dflash_offline.store.codecs import get_codec
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.size import store_bytes
from dflash_offline.store.state_error import measured_error
from dflash_offline.store.summary import describe_store, read_facts
from dflash_offline.store.writer import create_store
from dflash_offline.watch import Channel
from safetensors.torch import load_file, save_file

MakeConfig = Callable[..., ExtractConfig]
HIDDEN = 64


def states_of(reader: StoreReader, i: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Taps [Lt, n, H] and, where the store has it, last state [n, H] of a sample, as bits."""
    n, hidden = int(reader.samples.n[i]), reader.manifest.hidden_size
    taps = np.empty((len(reader.manifest.tap_layers), n, hidden), np.uint16)
    reader.read(i, taps)
    if not reader.manifest.has_last:
        return taps, None
    last = np.empty((n, hidden), np.uint16)
    reader.read_last(i, last)
    return taps, last


def through(name: str, bits: np.ndarray) -> np.ndarray:
    """What is left of bits [..., H] that were encoded and decoded."""
    codec, out = get_codec(name), np.empty_like(bits)
    codec.decode(codec.encode(bits), out)
    return out


MakeStore = Callable[[str], tuple[Path, PlanSummary, ExtractReport]]


@pytest.fixture(scope="module")
def store_of(tmp_path_factory: pytest.TempPathFactory, data: Path, make_config: MakeConfig) -> MakeStore:
    """store_of("zstd"): a store of `data` with the last state, made once, and what was planned and done."""

    @cache
    def make(codec: str) -> tuple[Path, PlanSummary, ExtractReport]:
        store = tmp_path_factory.mktemp("stored") / "store"
        config = make_config(data, store, last=True, codec=codec)
        return store, plan_command(config), extract(config)

    return make


@pytest.mark.parametrize("name", ["zstd", "int8:4"])
def test_a_store_holds_the_raw_states_encoded(store_of: MakeStore, name: str) -> None:
    raw_store, *_ = store_of("raw")
    store, planned, done = store_of(name)
    raw, encoded = StoreReader(raw_store), StoreReader(store)
    assert encoded.manifest.codec == name
    assert encoded.manifest.plan_sha256 == raw.manifest.plan_sha256
    assert len(encoded) == len(raw) == done.num_ok
    for i in range(len(raw)):
        (taps, last), (found, found_last) = states_of(raw, i), states_of(encoded, i)
        assert last is not None
        assert (found == through(name, taps)).all()
        assert (found_last == through(name, last)).all()
    assert not verify(store).faults
    sizes = {"num_segments": done.num_segments, "segment_positions": planned.segment_positions, "hidden_size": HIDDEN}
    expected = store_bytes(raw.samples.n, num_taps=len(planned.tap_layers), has_last=True, codec=name, **sizes)
    assert done.store_bytes < expected if name == "zstd" else done.store_bytes == expected
    assert expected < planned.store_bytes < expected + 440_000, "the rest is bounded from above"
    assert f"codec      {name}, " in planned.text()
    assert ("at most" in planned.text().split("store  ")[1]) == (name == "zstd")


def test_int8_measures_what_one_position_in_101_lost(store_of: MakeStore) -> None:
    """The same figures as by hand from the raw store, in the file, from the commits alone, and in `inspect`."""
    store, *_ = store_of("int8:4")
    raw, errors, num_all = StoreReader(store_of("raw")[0]), [], 0
    for i in range(len(raw)):
        taps, last = states_of(raw, i)
        assert last is not None
        planes = np.concatenate([taps, last[None]])
        num_all += planes.shape[0] * planes.shape[1]
        for place in range(planes.shape[1]):
            if (int(raw.samples.position[i]) + place) % 101 == 50:
                for bits in planes[:, place]:
                    old, new = (int8.as_float(b).astype(float) for b in (bits, through("int8:4", bits[None])[0]))
                    errors.append(np.linalg.norm(new - old) / np.linalg.norm(old))
    found = measured_error(store)
    assert found is not None
    assert (found["num_states"], found["num_all"]) == (len(errors), num_all)
    assert 0 < found["num_states"] < 0.02 * num_all
    assert found["worst"] == pytest.approx(max(errors), rel=1e-6)
    assert found["median"] == pytest.approx(np.quantile(errors, 0.5, method="inverted_cdf"), rel=0.006)
    assert (found["codecs"], found["against"], found["is_own"]) == (["int8:4"], ["raw"], True)
    share = f"relative L2 of {len(errors)} states ({len(errors) / num_all:.2%} of them): median"
    assert share in describe_store(read_facts(store))
    assert measured_error(store_of("raw")[0]) is None


def test_the_measured_error_of_an_unfinished_store(tmp_path: Path, store_of: MakeStore) -> None:
    store, *_ = store_of("int8:4")
    torn = shutil.copytree(store, tmp_path / "torn")
    (torn / "state_errors.json").unlink()
    (torn / "index.arrow").unlink()
    assert measured_error(torn) == measured_error(store)
    (torn / "commits" / "00000003.arrow").unlink()
    found, whole = measured_error(torn), measured_error(store)
    assert found is not None
    assert whole is not None
    assert 0 < found["num_states"] <= whole["num_states"]
    assert found["num_all"] < whole["num_all"]


def test_int8_bytes_do_not_depend_on_shards_nor_on_a_resume(
    tmp_path: Path, data: Path, store_of: MakeStore, make_config: MakeConfig, content: Any
) -> None:
    store, *_ = store_of("int8:4")
    torn = shutil.copytree(store, tmp_path / "torn")
    for segment in (0, 1, 2, 7, 12):
        (torn / "commits" / f"{segment:08d}.arrow").unlink()
    (torn / "index.arrow").unlink()
    done = extract(make_config(data, torn, last=True, codec="int8:4", shards=2))
    assert (done.num_new_segments, len(done.workers)) == (5, 2)
    assert content(torn) == content(store)


def test_another_codec_is_another_store(data: Path, store_of: MakeStore, make_config: MakeConfig) -> None:
    store, *_ = store_of("int8:4")
    for name, value in (("raw", "raw"), ("int8", "int8:16")):
        with pytest.raises(UserError, match=f'codec = "int8:4" there, "{value}" now'):
            plan_command(make_config(data, store, last=True, codec=name))


def test_samples_are_judged_before_they_are_encoded(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> None:
    """A NaN makes its whole row NaN: int8 could not say so, the commit does. A zero state stays a failed sample."""
    target = shutil.copytree(case_target(), tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    tensors["model.embed_tokens.weight"][8] = 0.0
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    lines = [{"input_ids": [first, 10, 11, 12, 13, 14], "loss_mask": [1] * 6} for first in (9, 7, 8)]
    config = make_config(make_data(lines, target), tmp_path / "store", codec="int8:4")
    extract_here(config, with_frozen=False)
    assert StoreReader(tmp_path / "store").samples.source_line.tolist() == [1]
    counts = report(Dealer(survey(config), set()), 1.0)
    assert (counts.num_ok, counts.num_non_finite, counts.num_failed) == (1, 1, 1)
    assert measured_error(tmp_path / "store") is None, "only sound samples are measured, and here they are short"


@pytest.mark.parametrize("command", [plan_command, extract])
def test_a_codec_that_does_not_fit_the_target_is_refused(
    tmp_path: Path, data: Path, make_config: MakeConfig, command: Callable[[ExtractConfig], Any]
) -> None:
    with pytest.raises(UserError, match=f"codec int8:{HIDDEN} cannot store rows of {HIDDEN} values"):
        command(make_config(data, tmp_path / "store", codec=f"int8:{HIDDEN}"))
    assert not (tmp_path / "store").exists()
    assert survey(make_config(data, tmp_path / "store", codec=f"int8:{HIDDEN - 1}"))


def test_a_batch_in_the_ring_takes_its_encoded_bytes(data: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    """At H = 64 a row of int8:1 takes 70 bytes of raw's 128."""
    found = survey(make_config(data, tmp_path / "store", codec="int8:1"))
    create_store(found.store_dir, found.manifest, found.plan.table, data)
    target = load_target(found.facts.name, dtype=found.facts.dtype)
    ours, theirs = Pipe()
    order = Dealer(found, set()).order("cpu")
    largest = Recorder(Channel(theirs, "here"), order, found.manifest, target).largest_batch_bytes()
    assert largest == 600 * len(found.manifest.tap_layers) * 70
    ours.close()
