"""What `dflash inspect` says of a store, against what was put in."""

import os
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.cli import main
from dflash_offline.store.codecs import get_codec
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.index import commit_path, write_consolidated
from dflash_offline.store.lengths import MOST_BINS, bin_width, histogram, text_bars
from dflash_offline.store.summary import describe_store, read_facts
from hypothesis import given
from hypothesis import strategies as st


def lines_of(store_dir: Path) -> dict[str, str]:
    """The facts that are told, by name."""
    text = describe_store(read_facts(store_dir)).split("\n\n")[0]
    return {name.strip(): value for name, value in (re.split(r"  +", line, maxsplit=1) for line in text.splitlines())}


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8:3"])
def test_a_whole_store(tmp_path: Path, small: ModuleType, codec: str) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 20, codec=codec, status={102: 1, 107: 2})
    write_frozen(store_dir, {"embedding": torch.randn(9, 8), "norm": torch.ones(8)}, manifest.target)
    assert write_consolidated(store_dir, manifest.identity_sha256, manifest.num_segments)
    told = lines_of(store_dir)
    positions = plan["n"].to_numpy()
    assert told["samples"] == "20 planned, 18 ok, 1 non-finite, 1 failed"
    assert told["positions"] == f"{positions.sum():,} planned, {positions.sum():,} committed"
    assert told["committed"] == f"{manifest.num_segments} of {manifest.num_segments} segments in commits/: complete"
    assert told["tokens"].startswith(f"{small.lengths(20).sum():,} in the planned samples; 2 to ")
    assert told["splits"] == "16 train, 4 heldout"
    assert told["tasks"] == "7 chat, 7 code, 6 mathematics"
    assert told["sources"] == "20 a.jsonl"
    assert told["codec"].startswith(f"{codec}, bfloat16 values of {2.75 if codec == 'int8:3' else 2} bytes")
    assert told["error"] == get_codec(codec).error
    assert ("unknown" in told.get("measured", "")) == (codec == "int8:3")
    assert "speed" not in told
    sizes = [path.stat().st_size for path in (store_dir / "hidden").glob("c.*")]
    sizes += [path.stat().st_size for path in (store_dir / "last").glob("c.*")]
    there = positions[plan["sample_id"].to_numpy() != 107].sum()
    assert told["on disk"].startswith(f"{sum(sizes) / (there * 4 * 8):.3f} bytes a value")
    total = sum(path.stat().st_size for path in store_dir.rglob("*") if path.is_file() and "lock" not in path.name)
    assert abs(total - manifest_bytes(store_dir) - float(told["bytes"].split()[0]) * 1e3) < 0.01 * total


def manifest_bytes(store_dir: Path) -> int:
    return (store_dir / "zarr.json").stat().st_size


def test_progress_of_an_unfinished_store(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 20, fill=False)
    told = lines_of(store_dir)
    assert told["committed"].startswith(f"0 of {manifest.num_segments} segments")
    assert told["samples"] == "20 planned, none committed"
    small.fill_segments(small.StoreWriter(store_dir, manifest), [0, 2])
    for segment, when in ((0, 1_000.0), (2, 1_004.0)):
        os.utime(commit_path(store_dir, segment), (when, when))
    told = lines_of(store_dir)
    done = plan["n"].to_numpy()[np.isin(plan["segment"].to_numpy(), [0, 2])].sum()
    share = f"{done / manifest.num_positions:.1%}"
    assert told["committed"] == (
        f"2 of {manifest.num_segments} segments in commits/: unfinished, {share} of the positions"
    )
    assert "speed" not in told, "times of files hold pauses, and copies give new ones"


def test_a_store_of_no_samples(tmp_path: Path, small: ModuleType) -> None:
    store_dir, _, _ = small.make_store(tmp_path, 0)
    assert lines_of(store_dir)["samples"] == "0 planned, none committed"


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=40))
def test_bars_count_every_length_once(lengths: list[int]) -> None:
    array = np.array(lengths, dtype=np.int32)
    width, counts = histogram(array)
    assert len(counts) <= MOST_BINS
    assert str(width).strip("0") in ("1", "2", "5")
    for number, count in enumerate(counts.tolist()):
        assert count == sum(number * width <= n < (number + 1) * width for n in lengths)
    bars = text_bars(array)
    assert sum(int(re.split(r" +", line.strip().split("-", 1)[1])[1].replace(",", "")) for line in bars) == len(lengths)
    assert max(line.count("#") for line in bars) == 40
    assert width == 1 or max(lengths) >= bin_width(max(lengths) // 3)


def test_the_command_draws(tmp_path: Path, small: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    store_dir, _, _ = small.make_store(tmp_path, 20)
    main(["inspect", str(store_dir), "--png", str(tmp_path / "lengths.png")])
    told = capsys.readouterr().out
    assert "samples by their number of tokens" in told
    assert re.search(r"^ *0-49 +3 #+$", told, flags=re.MULTILINE)
    assert (tmp_path / "lengths.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    main(["inspect", str(store_dir), "--png", str(tmp_path / "lengths.png")])  # replaces its own picture
    assert "lengths drawn" in capsys.readouterr().out
    empty, _, _ = small.make_store(tmp_path / "empty", 0)
    from dflash_offline.store.summary import plot_store

    with pytest.raises(UserError, match="holds no sample"):
        plot_store(read_facts(empty), tmp_path / "none.png")


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\x89PNG\r\n"], ids=["empty", "text", "cut"])
def test_a_file_that_is_no_picture_is_not_replaced(
    tmp_path: Path, small: ModuleType, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    store_dir, _, _ = small.make_store(tmp_path, 3)
    path = tmp_path / "numbers.csv"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        main(["inspect", str(store_dir), "--png", str(path)])
    told = capsys.readouterr().err
    assert "numbers.csv' is there and is no PNG" in told
    assert len(told.splitlines()) == 3
    assert path.read_bytes() == content
