"""tensorstore, and the newest zarr-python where a newer Python is there, open every array bit for bit.

Each runs in an environment of its own, made here from the package index.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.slow
SEGMENT = 512
CODECS = ["raw", "zstd", "int8:3"]
TENSORSTORE = """
import sys, numpy as np, tensorstore as ts
store, total, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
arrays = {}
for name in ("hidden", "last"):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store}/{name}/"}}
    array = ts.open(spec, read=True).result()
    assert array.shape[0] == 2**40, array.shape
    for place, first in (("written", 0), ("far", 10**9)):
        part = np.asarray(array[first : first + (total if place == "written" else 64)].read().result())
        arrays[f"{name}-{place}"] = part.view(np.uint16 if part.dtype.itemsize == 2 else np.uint8)
np.savez(out, **arrays)
"""
ZARR = """
import sys, numpy as np, zarr, ml_dtypes
from dflash_offline.store import bfloat16
bfloat16.register()
store, total, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
arrays = {}
for name in ("hidden", "last"):
    array = zarr.open_group(store, mode="r")[name]
    assert array.shape[0] == 2**40, array.shape
    for place, first in (("written", 0), ("far", 10**9)):
        part = np.asarray(array[first : first + (total if place == "written" else 64)])
        arrays[f"{name}-{place}"] = part.view(np.uint16 if part.dtype.itemsize == 2 else np.uint8)
np.savez(out, **arrays)
"""


def environment(folder: Path, packages: list[str], python: str | None) -> Path:
    if python is None:
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    install = [str(own), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    subprocess.run(install, check=True, stdout=sys.stderr)
    return own


def newer_python() -> str | None:
    """A Python from 3.12 on that starts; version managers leave names on the PATH that do not."""
    for number in range(20, 11, -1):
        found = shutil.which(f"python3.{number}")
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
            return found
    return None


@pytest.fixture(scope="module", params=["tensorstore", "zarr"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An interpreter with another reader, and the program that reads a store with it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tensorstore":
        return environment(folder, ["tensorstore", "numpy"], None), TENSORSTORE
    newer = newer_python()
    if newer is None:
        pytest.skip("no Python 3.12 or newer here, which the newest zarr-python needs")
    root = Path(__file__).parents[2]
    link = folder / "package" / "dflash_offline"
    link.parent.mkdir()
    link.symlink_to(root)
    python = environment(folder / "env", ["zarr", "ml_dtypes", "numpy"], newer)
    return python, f"import sys; sys.path.insert(0, {str(link.parent)!r})\n{ZARR}"


@pytest.mark.parametrize("codec_name", CODECS)
def test_every_array_bit_for_bit(other: tuple[Path, str], tmp_path: Path, small: ModuleType, codec_name: str) -> None:
    """Tail chunks, a failed sample, a segment that was never written, and places far behind the last one."""
    from dflash_offline.store.codecs import get_codec

    codec = get_codec(codec_name)
    store_dir, manifest, plan = small.make_store(tmp_path, 14, fill=False, codec=codec_name)
    writer = small.StoreWriter(store_dir, manifest)
    left_out = manifest.num_segments - 2
    for segment in range(manifest.num_segments):
        if segment != left_out:
            small.fill_segment(writer, segment, {103: 2})
    total = manifest.num_segments * SEGMENT
    python, program = other
    out = tmp_path / "out.npz"
    done = subprocess.run(
        [str(python), "-c", program, str(store_dir), str(total), str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(out)
    for name, taps, shift in (("hidden", 3, 0), ("last", 1, 10**6)):
        expected, is_written = nothing(total, taps, codec, small.HIDDEN)
        for row in plan.to_pylist():
            first, n = row["segment"] * SEGMENT + row["position"], row["n"]
            if row["sample_id"] != 103 and row["segment"] != left_out:
                states = small.states(row["sample_id"] + shift, n, taps)
                rows = codec.encode(states).view(expected.dtype)
                expected[first : first + n] = rows.transpose(1, 0, 2)
                is_written[first : first + n] = True
        assert is_written.sum() > 700
        got = found[f"{name}-written"]
        assert np.array_equal(got[is_written], expected[is_written])
        assert np.array_equal(got, expected)
        assert np.array_equal(found[f"{name}-far"], nothing(64, taps, codec, small.HIDDEN)[0])


def nothing(positions: int, taps: int, codec, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """What stands where nothing was written: NaN, or zeros in an array of bytes."""
    kind, value = (np.uint16, 0x7FC0) if codec.is_lossless else (np.uint8, 0)
    return np.full((positions, taps, codec.row_items(hidden)), value, kind), np.zeros(positions, bool)
