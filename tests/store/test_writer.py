"""Making a store, filling it, being killed at it, and refusing to become another one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.files import FolderLock
from dflash_offline.store.index import commit_path, write_consolidated
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.writer import StoreWriter, create_store


def test_creating_twice_changes_nothing(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 6)
    before = {path: path.stat().st_mtime_ns for path in store_dir.rglob("*") if path.is_file()}
    create_store(store_dir, manifest, plan, tmp_path / "data")
    after = {path: path.stat().st_mtime_ns for path in store_dir.rglob("*") if path.is_file()}
    assert {p: t for p, t in before.items() if "lock" not in p.name} == {
        p: t for p, t in after.items() if "lock" not in p.name
    }


def test_tokens_are_linked_and_survive_the_data_folder(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 10)
    assert os.path.samefile(tmp_path / "data/tokens-00000.arrow", store_dir / "plan/tokens-00000.arrow")
    shutil.rmtree(tmp_path / "data")
    create_store(store_dir, manifest, plan, tmp_path / "data")
    with StoreReader(store_dir) as reader:
        ids, mask = reader.tokens(3)
        assert len(ids) == len(mask) == reader.samples.n[3] + 1


def test_a_missing_token_file_is_named(tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 10))
    (tmp_path / "data/tokens-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"tokens-00001\.arrow"):
        create_store(tmp_path / "store", small.make_manifest(plan), plan, tmp_path / "data")


@pytest.mark.parametrize("is_filled", [True, False])
def test_another_identity_is_refused_and_nothing_touched(tmp_path: Path, small: ModuleType, is_filled: bool) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 6, fill=is_filled)
    before = small.tree(store_dir)
    for name, other in {
        "tap_layers": replace(manifest, tap_layers=(1, 9, 18)),
        "target.revision": replace(manifest, target={**manifest.target, "revision": "main"}),
        "has_last": replace(manifest, has_last=False),
    }.items():
        with pytest.raises(UserError, match=f"{name} = .* there, .* now"):
            create_store(store_dir, other, plan, tmp_path / "data")
        with pytest.raises(UserError, match=f"{name} = .* there, .* now"):
            StoreWriter(store_dir, other)
    assert small.tree(store_dir) == before


def test_a_foreign_folder_is_refused(tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    manifest = small.make_manifest(plan)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").touch()
    with pytest.raises(UserError, match=r"letter\.txt"):
        create_store(tmp_path / "home", manifest, plan, tmp_path / "data")
    with pytest.raises(UserError, match="is a file"):
        create_store(tmp_path / "home/letter.txt", manifest, plan, tmp_path / "data")
    assert os.listdir(tmp_path / "home") == ["letter.txt"]
    with FolderLock(tmp_path):  # a lock file of the caller is no foreign file
        (tmp_path / "fresh").mkdir()
        (tmp_path / "fresh/.lock").touch()
        create_store(tmp_path / "fresh", manifest, plan, tmp_path / "data")


def test_a_manifest_that_contradicts_its_plan_is_refused(tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    manifest = small.make_manifest(plan)
    for change in ({"num_samples": 4}, {"num_positions": 1}, {"plan_sha256": "00"}):
        with pytest.raises(ValueError, match=next(iter(change))):
            create_store(tmp_path / "store", replace(manifest, **change), plan, tmp_path / "data")
    assert not (tmp_path / "store").exists()


def test_misuse_of_a_segment_is_refused(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 6, fill=False)
    writer = StoreWriter(store_dir, manifest)
    with pytest.raises(ValueError, match="outside"):
        writer.open(manifest.num_segments)
    sink = writer.open(0)
    sample_id, position, n = (int(sink.plan[name][0]) for name in ("sample_id", "position", "n"))
    planes, last = small.states(sample_id, n), small.states(1, n, 1)[0]
    for arguments, status in (
        ((sample_id + 1, position, planes, last), 0),  # another sample's place
        ((sample_id, position + 64, planes, last), 0),
        ((sample_id, position, planes[:, :-1].copy(), last[:-1]), 0),
        ((sample_id, position, planes, None), 0),
        ((sample_id, position, None, None), 0),
        ((sample_id, position, planes, last), 2),
        ((sample_id, position, planes, last), 3),
    ):
        with pytest.raises(ValueError, match="sample"):
            sink.append(*arguments, status=status)
    sink.append(sample_id, position, planes, last)
    with pytest.raises(ValueError, match="not awaited"):
        sink.append(sample_id, position, planes, last)
    with pytest.raises(ValueError, match="missing"):
        sink.commit({})
    sink.abort()
    assert not list(store_dir.rglob("*.tmp.*"))
    assert writer.committed() == set()


def test_a_segment_written_again_replaces_the_consolidated_index(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 10)
    assert write_consolidated(store_dir, manifest.plan_sha256, manifest.num_segments)
    commit_path(store_dir, 1).unlink()
    writer = StoreWriter(store_dir, manifest)
    assert writer.committed() == set(range(manifest.num_segments)) - {1}
    small.fill_segment(writer, 1)
    assert not (store_dir / "index.arrow").exists()
    assert writer.committed() == set(range(manifest.num_segments))


def test_a_commit_without_its_segment_file_is_named(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 10)
    path = store_dir / "last/c.1.0.0"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"00000001\.arrow.*c\.1\.0\.0 has"):
        StoreWriter(store_dir, manifest).committed()
    path.unlink()
    with pytest.raises(UserError, match=r"00000001\.arrow.*c\.1\.0\.0 is missing"):
        StoreWriter(store_dir, manifest).committed()


def test_killed_at_every_step(tmp_path: Path, python_environment: dict[str, str]) -> None:
    program = Path(__file__).with_name("killed_at_every_step.py")
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], env=python_environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout)
    assert steps["create"] > 20
    assert steps["fill"] > 10 * steps["segments"]


def test_killed_writers_lose_nothing_and_double_nothing(
    tmp_path: Path, small: ModuleType, program: list[str], python_environment: dict[str, str]
) -> None:
    """Twelve SIGKILLs of three or four writers at once, their number changed in between."""
    expected_dir, manifest, plan = small.make_store(tmp_path, 120)
    assert manifest.num_segments > 30
    store_dir, kills = tmp_path / "killed", 0
    for round_number, world in enumerate((3, 4, 2, 3)):
        command = [*program, str(store_dir), str(tmp_path / "data")]
        writers = [
            subprocess.Popen([*command, str(rank), str(world)], env=python_environment, stdout=subprocess.PIPE)
            for rank in range(world)
        ]
        for rank, writer in enumerate(writers):
            assert writer.stdout is not None
            for _ in range(1 + (rank + round_number) % 2):  # ends at once when the writer does
                writer.stdout.readline()
            kills += writer.poll() is None
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.communicate()
    assert kills >= 6  # a writer may be faster than the signal
    for rank in range(2):
        subprocess.run(
            [*program, str(store_dir), str(tmp_path / "data"), str(rank), "2"], env=python_environment, check=True
        )
    assert small.tree(store_dir) == small.tree(expected_dir)  # bit for bit, no debris
    with StoreReader(store_dir) as reader:
        assert reader.samples.sample_id.tolist() == plan["sample_id"].to_pylist()
        for i, (sample_id, n) in enumerate(zip(reader.samples.sample_id.tolist(), reader.samples.n.tolist())):
            out = np.empty((3, n, small.HIDDEN), dtype=np.uint16)
            reader.read(i, out)
            assert np.array_equal(out, small.states(sample_id, n))
