"""Extraction with --window against the same extraction without it, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.copying import SideStream
from dflash_offline.extract.foretell import plan_command
from dflash_offline.extract.launch import extract
from dflash_offline.extract.sent_batch import recorded_part
from dflash_offline.extract.survey import Survey
from dflash_offline.store.config import RecodeConfig
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import read_manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.recode import recode

MakeConfig = Callable[..., ExtractConfig]
WINDOW = 12
ONE_SEGMENT = 16384  # batches are formed inside a group of segments and decide the last bits, so both stores have one


def states_of(store: Path) -> dict[int, tuple[np.ndarray, np.ndarray, int, np.ndarray]]:
    """Rows of the taps and of the last state as stored, first recorded token and mask, by sample id."""
    found = {}
    with StoreReader(store) as reader:
        for i, sample_id in enumerate(reader.samples.sample_id.tolist()):
            n, rows = int(reader.samples.n[i]), {}
            for array, geometry in reader.geometries.items():
                rows[array] = np.empty((geometry.taps, n, geometry.row_bytes), np.uint8)
                reader.read_rows(i, rows[array], array=array)
            found[sample_id] = (rows["hidden"], rows["last"], int(reader.samples.first[i]), reader.tokens(i)[1])
    return found


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, data: Path, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> dict[str, Path]:
    """Stores of all positions by codec; read them, never change them."""
    stores = {}
    for codec in ("raw", "int8:4"):
        stores[codec] = tmp_path_factory.mktemp("whole") / "store"
        extract_here(make_config(data, stores[codec], last=True, segment_positions=ONE_SEGMENT, codec=codec))
    return stores


@pytest.mark.parametrize("codec", ["raw", "int8:4"])
def test_a_window_stores_the_slice_of_the_whole_bit_for_bit(
    tmp_path: Path, data: Path, whole: dict[str, Path], make_config: MakeConfig, codec: str
) -> None:
    """Through workers, writers and their ring, in batches of samples with different first tokens."""
    store = tmp_path / "store"
    config = make_config(data, store, last=True, segment_positions=ONE_SEGMENT, codec=codec, window=WINDOW)
    planned, done = plan_command(config), extract(config)
    expected, found = states_of(whole[codec]), states_of(store)
    assert found.keys() == expected.keys()
    for sample_id, (hidden, last, first, mask) in found.items():
        anchor = next(a for a in range(len(mask)) if mask[a] and mask[a + 1])
        assert first == max(0, anchor - WINDOW)
        assert np.array_equal(hidden, expected[sample_id][0][:, first:])
        assert np.array_equal(last, expected[sample_id][1][:, first:])
    firsts = [first for _, _, first, _ in found.values()]
    assert 0 < sum(first == 0 for first in firsts) < len(firsts) / 2
    assert not verify(store).faults
    assert read_manifest(store).window == WINDOW
    recorded = sum(hidden.shape[1] for hidden, *_ in found.values())
    assert done.num_positions == planned.num_positions == recorded
    assert planned.num_outside_window == sum(firsts)
    assert f"{recorded:,} to record (window {WINDOW} leaves out {sum(firsts):,})" in planned.text()
    sizes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert sizes <= planned.store_bytes < sizes + 300_000


def test_a_recode_with_that_window_gives_the_same_states(
    tmp_path: Path, data: Path, whole: dict[str, Path], make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> None:
    extract_here(make_config(data, tmp_path / "a", last=True, segment_positions=ONE_SEGMENT, window=WINDOW))
    recode(RecodeConfig(out=str(tmp_path / "b"), workers=1, window=WINDOW), [str(whole["raw"])])
    one, two = states_of(tmp_path / "a"), states_of(tmp_path / "b")
    assert one.keys() == two.keys()
    for sample_id, (hidden, last, first, _) in one.items():
        assert np.array_equal(hidden, two[sample_id][0])
        assert np.array_equal(last, two[sample_id][1])
        assert first == two[sample_id][2]


def test_without_the_option_nothing_is_left_out(data: Path, whole_store: Path, make_config: MakeConfig) -> None:
    reader = StoreReader(whole_store)
    assert reader.manifest.window is None
    assert not reader.samples.first.any()
    planned = plan_command(make_config(data, whole_store))
    assert (planned.window, planned.num_outside_window) == (None, 0)
    assert "window" not in planned.text()


def test_a_store_of_another_window_is_refused_with_both_values(
    data: Path, whole_store: Path, make_config: MakeConfig
) -> None:
    with pytest.raises(UserError, match=f"window = null there, {WINDOW} now"):
        extract(make_config(data, whole_store, window=WINDOW))
    with pytest.raises(UserError, match="window = 0"):
        make_config(data, whole_store, window=0)


def test_bytes_of_a_window_do_not_depend_on_shards(
    tmp_path: Path, data: Path, make_config: MakeConfig, extract_here: Callable[..., Survey], content: Any
) -> None:
    extract_here(make_config(data, tmp_path / "here", window=WINDOW))
    assert len(extract(make_config(data, tmp_path / "two", window=WINDOW, shards=2)).workers) == 2
    assert content(tmp_path / "here") == content(tmp_path / "two")


def test_the_recorded_part_against_a_loop() -> None:
    states = torch.arange(2 * 3 * 9 * 4).reshape(2, 3, 9, 4).to(torch.bfloat16)
    first, n = np.array([2, 0, 6], dtype=np.int32), np.array([4, 5, 3], dtype=np.int32)
    side = SideStream(torch.device("cpu"))
    part = recorded_part(states, first, n, side)
    assert part.shape == (2, 3, 5, 4)
    for place in range(3):
        for offset in range(n[place]):
            assert torch.equal(part[:, place, offset], states[:, place, first[place] + offset])
    assert recorded_part(states, 0 * first, n, side) is states
