"""zarr-python reads our stores bit for bit, and we read its shards."""

from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from dflash_offline.store import bfloat16
from dflash_offline.store.geometry import SegmentGeometry
from dflash_offline.store.segment_reader import SegmentReader
from zarr.codecs import Crc32cCodec

SEGMENT = 512


@pytest.fixture(scope="module", autouse=True)
def plug_in() -> None:
    bfloat16.register()


def test_every_position_of_a_store(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 10, status={103: 2})
    group: Any = zarr.open_group(store_dir, mode="r")
    assert group.attrs["dflash"]["tap_layers"] == list(manifest.tap_layers)
    hidden, last = group["hidden"], group["last"]
    assert hidden.shape == (2**40, 3, small.HIDDEN)
    assert hidden.dtype == np.dtype(ml_dtypes.bfloat16)
    total = manifest.num_segments * SEGMENT
    expected = np.full((total, 3, small.HIDDEN), 0x7FC0, dtype=np.uint16)  # NaN where nothing is
    expected_last = np.full((total, 1, small.HIDDEN), 0x7FC0, dtype=np.uint16)
    for row in plan.to_pylist():
        first, n = row["segment"] * SEGMENT + row["position"], row["n"]
        if row["sample_id"] != 103:
            expected[first : first + n] = small.states(row["sample_id"], n).transpose(1, 0, 2)
            expected_last[first : first + n] = small.states(row["sample_id"] + 10**6, n, 1).transpose(1, 0, 2)
    assert np.array_equal(np.asarray(hidden[:total]).view(np.uint16), expected)
    assert np.array_equal(np.asarray(last[:total]).view(np.uint16), expected_last)
    assert (expected != 0x7FC0).all(axis=(1, 2)).sum() > 800  # the comparison was about something


def test_an_unwritten_segment_reads_as_nan(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 10, fill=False)
    writer = small.StoreWriter(store_dir, manifest)
    small.fill_segment(writer, 1)
    hidden: Any = zarr.open_group(store_dir, mode="r")["hidden"]
    for first in (0, 2 * SEGMENT, 10**9):
        assert np.isnan(np.asarray(hidden[first : first + SEGMENT]).astype(np.float32)).all()
    row = next(row for row in plan.to_pylist() if row["segment"] == 1)
    found = np.asarray(hidden[SEGMENT : SEGMENT + row["n"]]).view(np.uint16)
    assert np.array_equal(found, small.states(row["sample_id"], row["n"]).transpose(1, 0, 2))


def test_zarr_notices_a_flipped_bit_too(tmp_path: Path, small: ModuleType) -> None:
    store_dir, _, _ = small.make_store(tmp_path, 3)
    path = store_dir / "hidden" / "c.0.0.0"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    hidden: Any = zarr.open_array(store_dir / "hidden", mode="r")
    with pytest.raises(ValueError, match="checksum"):
        hidden[:SEGMENT]


def test_shards_written_by_zarr_python_are_readable_here(tmp_path: Path) -> None:
    """Its chunks come in Morton order, so a sample is not one extent."""
    shape = (SEGMENT, 3, 4)
    array = zarr.create_array(
        tmp_path / "hidden",
        shape=(2 * SEGMENT, 3, 4),
        dtype=np.dtype(ml_dtypes.bfloat16),
        shards=shape,
        chunks=(64, 1, 4),
        compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        fill_value=float("nan"),
    )
    values = np.random.default_rng(0).normal(size=shape).astype(ml_dtypes.bfloat16)
    array[:SEGMENT] = values
    reader = SegmentReader(tmp_path / "hidden" / "c.0.0.0", SegmentGeometry(SEGMENT, 3, 4))
    out = np.zeros((2, 300, 4), dtype=np.uint16)
    reader.read(64, 300, out, taps=[2, 0], start=7)
    reader.close()
    assert np.array_equal(out, values.view(np.uint16)[71:371, [2, 0]].transpose(1, 0, 2))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", 1.5])
def test_fill_values_round_trip(value: object) -> None:
    kind = bfloat16.BFloat16()
    assert kind.to_json_scalar(kind.from_json_scalar(value, zarr_format=3), zarr_format=3) == value


def test_zarr_v2_and_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="v3"):
        bfloat16.BFloat16().to_json(2)
    with pytest.raises(ValueError, match="not bfloat16"):
        bfloat16.BFloat16.from_native_dtype(np.dtype(np.float32))
    with pytest.raises(ValueError, match="not bfloat16"):
        bfloat16.BFloat16.from_json("float32", zarr_format=3)
