"""A damaged store of a whole extraction is marked by `verify --repair` and made whole by the same extract."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.cli import main
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.launch import extract
from dflash_offline.extract.survey import survey
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.repair import repair

MakeConfig = Callable[..., ExtractConfig]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def states(store: Path) -> list[np.ndarray]:
    """Every sample's states, in the order of the plan."""
    with StoreReader(store) as reader:
        shape = len(reader.manifest.tap_layers), reader.manifest.hidden_size
        planes = [np.empty((shape[0], n, shape[1]), dtype=np.uint16) for n in reader.samples.n.tolist()]
        for i, out in enumerate(planes):
            reader.read(i, out)
    return planes


def test_repair_then_extract_gives_the_same_store(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, content: Callable[[Path], dict[str, str]]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole_store, store)
    flip(store / "hidden/c.0.0.0", 100)
    flip(store / "hidden/c.2.0.0", -3)
    (store / "hidden/c.3.0.0").unlink()
    flip(store / "commits/00000005.arrow", 700)
    report = verify(store)
    assert report.damaged_segments == [0, 2, 3, 5]
    with pytest.raises(UserError):  # extract takes no damaged commit for a good one
        extract(make_config(data, store))
    assert list(repair(store, report).segments) == [0, 2, 3, 5]
    done = extract(make_config(data, store))
    assert done.num_new_segments == 4
    again = verify(store)
    assert (again.faults, again.uncommitted) == ([], [])
    assert {path: sha for path, sha in content(store).items() if ".damaged-" not in path} == content(whole_store)
    assert all(np.array_equal(a, b) for a, b in zip(states(store), states(whole_store), strict=True))


def test_the_printed_command_goes_on_with_a_store_of_many_settings(
    tmp_path: Path, data: Path, make_config: MakeConfig, content: Callable[[Path], dict[str, str]]
) -> None:
    store = tmp_path / "a store"
    changes = {"codec": "int8:4", "last": True, "window": 24, "segment_positions": 1024, "dtype": "bfloat16"}
    extract(make_config(data, store, **changes))
    before = content(store)
    flip(store / "last/c.1.0.0", 100)
    words = shlex.split(repair(store, verify(store)).command)
    main([*(str(data) if word == "DATA" else word for word in words[1:]), "--devices", "cpu", "--token-budget", "600"])
    assert {path: sha for path, sha in content(store).items() if ".damaged-" not in path} == before


def test_lost_small_files_are_written_anew_by_extract(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, content: Callable[[Path], dict[str, str]]
) -> None:
    """What `verify` advises for faults outside segments: delete the file, run the same extract."""
    store = tmp_path / "store"
    shutil.copytree(whole_store, store)
    for name in ("plan/index.arrow", "plan/tokens-00000.arrow", "hidden/zarr.json", "frozen/frozen.safetensors"):
        flip(store / name, 200)
    report = verify(store)
    assert not report.damaged_segments
    advice = {fault.advice for fault in report.faults}
    assert all("run the same extract again" in text for text in advice), advice
    for name in ("plan/index.arrow", "plan/tokens-00000.arrow", "hidden/zarr.json"):
        (store / name).unlink()
    shutil.rmtree(store / "frozen")
    extract(make_config(data, store))
    assert not verify(store).faults
    assert content(store) == content(whole_store)


def test_samples_of_1_63_64_and_65_positions(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig, extract_here: Any
) -> None:
    """Their last trained pair ends there; two of them fill their chunks to the brim."""
    wanted = [1, 63, 64, 65]
    lines = [{"input_ids": [6 + i % 200 for i in range(n + 1)], "loss_mask": [1] * (n + 1)} for n in wanted]
    data = make_data(lines, case_target())
    extract_here(make_config(data, tmp_path / "store"))
    with StoreReader(tmp_path / "store") as reader:
        assert sorted(reader.samples.n.tolist()) == wanted
        assert all(len(reader.tokens(i)[0]) == reader.samples.n[i] + 1 for i in range(4))
    assert len(states(tmp_path / "store")) == 4
    assert not verify(tmp_path / "store").faults
    with pytest.raises(UserError, match=r"segment_positions = 64 .* longest sample, 128 positions"):
        survey(make_config(data, tmp_path / "other", segment_positions=64))


def test_two_launchers_on_one_store(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, start_extract: Any, content: Any
) -> None:
    """Started together, one of them works and the other says who does; the store is whole."""
    config = make_config(data, tmp_path / "store")
    runs = [start_extract(config, shards=1) for _ in range(2)]
    ends = [run.end(limit_s=240.0) for run in runs]
    codes = sorted(code for code, _, _ in ends)
    assert codes in ([0, 1], [0, 0])  # both end well where the second came when all was done
    for code, _, err in ends:
        assert code == 0 or "is in use by process" in err
        assert "Traceback" not in err
    assert content(tmp_path / "store") == content(whole_store)
