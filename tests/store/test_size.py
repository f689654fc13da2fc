"""Sizes: planned, typed and printed."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.geometry import SegmentGeometry
from dflash_offline.store.segment_writer import SegmentWriter
from dflash_offline.store.size import bytes_per_position, human_bytes, parse_size, store_bytes


@pytest.mark.parametrize("has_last", [True, False])
def test_the_planned_bytes_are_the_bytes_on_disk(tmp_path: Path, small: ModuleType, has_last: bool) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 20, has_last=has_last)
    found = sum(path.stat().st_size for path in store_dir.glob("*/c.*"))
    planned = store_bytes(
        plan["n"].to_numpy(),
        num_segments=manifest.num_segments,
        segment_positions=manifest.segment_positions,
        num_taps=len(manifest.tap_layers),
        hidden_size=manifest.hidden_size,
        has_last=has_last,
    )
    assert planned == found


def test_zstd_never_takes_more_than_planned(tmp_path: Path) -> None:
    """Random bits do not pack: their chunk keeps its bytes and gets a head."""
    geometry = SegmentGeometry(positions=64, taps=1, hidden=256, codec_name="zstd")
    writer = SegmentWriter(tmp_path / "segment", geometry)
    writer.append(0, np.random.default_rng(0).integers(0, 65536, (1, 64, 256)).astype(np.uint16))
    planned = store_bytes(
        np.array([64]), num_segments=1, segment_positions=64, num_taps=1, hidden_size=256, codec="zstd"
    )
    assert writer.finish() == planned
    assert bytes_per_position(1, 256, codec="zstd") * 64 == planned - geometry.index_bytes


def test_bytes_of_a_position() -> None:
    assert bytes_per_position(5, 5120) == pytest.approx(51_200, rel=1e-4)
    assert bytes_per_position(5, 5120, has_last=True) == pytest.approx(61_440, rel=1e-4)


@pytest.mark.parametrize(
    "text, size_bytes",
    [
        ("20TB", 20 * 10**12),
        ("1.5 GiB", 3 * 2**29),
        ("800mb", 8 * 10**8),
        ("4096", 4096),
        ("7 k", 7000),
        (" 2PiB ", 2**51),
    ],
)
def test_sizes_are_understood(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "TB", "-3GB", "3XB", "3 GB 4", "1e9", "3iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400 + "TB", "10000 PB", "9223372036854775808"])
def test_more_than_any_disk_holds_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"is more than any disk holds\nexpected: at most 9000 PB") as caught:
        parse_size(text)
    assert len(caught.value.happened) < 80


@pytest.mark.parametrize(
    "size_bytes, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_680_000_000, "1.68 GB"), (2.5e16, "25 PB")],
)
def test_sizes_for_people(size_bytes: float, text: str) -> None:
    assert human_bytes(size_bytes) == text
