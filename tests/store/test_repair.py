"""`verify --repair`: damaged segments are marked, written again, and the store is what it was."""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.cli import COMMANDS, main
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.options import resolved
from dflash_offline.store.arrow_file import read_table, write_table
from dflash_offline.store.files import FolderLock
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.index import COMMIT_SCHEMA, write_consolidated
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import Manifest, read_manifest, write_manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.repair import next_command, repair


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> tuple[Path, Manifest]:
    store_dir, manifest, _ = small.make_store(tmp_path_factory.mktemp("made"), 16)
    write_frozen(store_dir, {"embedding": torch.randn(9, 8), "norm": torch.ones(8)}, manifest.target)
    assert write_consolidated(store_dir, manifest.identity_sha256, manifest.num_segments)
    return store_dir, manifest


@pytest.fixture
def copy(made: tuple[Path, Manifest], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "copy"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def other_checksum(store: Path) -> None:
    """A sound `index.arrow` that says something else of segment 1 than its commit."""
    manifest, path = read_manifest(store), store / "commits/00000001.arrow"
    before = path.read_bytes()
    table, metadata = read_table(path, COMMIT_SCHEMA)
    del metadata["checksum"]
    place = table.schema.get_field_index("crc32c")
    wrong = pa.array(table.column("crc32c").to_numpy() ^ 1)
    write_table(path, table.set_column(place, COMMIT_SCHEMA.field("crc32c"), wrong), metadata)
    assert write_consolidated(store, manifest.identity_sha256, manifest.num_segments)
    path.write_bytes(before)


DAMAGES: dict[str, tuple[Callable[[Path], object], list[int]]] = {
    "a bit of a chunk": (lambda store: flip(store / "hidden/c.1.0.0", 40), [1]),
    "a segment is gone": (lambda store: (store / "last/c.0.0.0").unlink(), [0]),
    "a commit": (lambda store: flip(store / "commits/00000001.arrow", 300), [1]),
    "an index that differs": (other_checksum, [1]),  # which of the two is wrong cannot be told
    "several": (lambda store: [flip(store / f"hidden/c.{number}.0.0", -30) for number in (0, 2)], [0, 2]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_marked_segments_are_written_again(
    copy: Path, made: tuple[Path, Manifest], small: ModuleType, name: str
) -> None:
    damage, segments = DAMAGES[name]
    damage(copy)
    before = small.tree(copy)
    report = verify(copy)
    assert report.damaged_segments == segments
    marked = repair(copy, report)
    assert list(marked.segments) == segments
    assert not marked.others
    after = small.tree(copy)
    moved = {f"commits/{number:08d}.arrow" for number in segments} & set(before)
    assert set(before) - set(after) == moved | {"index.arrow"}  # the rest is there, under its name and bit for bit
    kept = {path.relative_to(copy).as_posix() for path in (*marked.segments.values(), marked.index_path) if path}
    assert kept == set(after) - set(before)
    assert sorted(after[path] for path in kept) == sorted(before[path] for path in moved | {"index.arrow"})
    assert all(after[path] == data for path, data in before.items() if path in after)

    assert not verify(copy).faults
    assert verify(copy).uncommitted == segments
    with pytest.raises(UserError, match="not complete"):
        StoreReader(copy)
    writer = small.StoreWriter(copy, made[1])
    assert sorted(set(range(made[1].num_segments)) - writer.committed()) == segments
    small.fill_segments(writer, segments)
    assert write_consolidated(copy, made[1].identity_sha256, made[1].num_segments)
    again = verify(copy)
    assert (again.faults, again.uncommitted) == ([], [])
    assert {path: data for path, data in small.tree(copy).items() if ".damaged-" not in path} == small.tree(made[0])


@pytest.mark.parametrize("has_index", [True, False])
def test_a_segment_of_another_store_is_written_again(
    copy: Path, made: tuple[Path, Manifest], small: ModuleType, tmp_path: Path, has_index: bool
) -> None:
    """Of the same data and plan, sound in itself, but of other taps."""
    plan = small.make_plan(small.make_samples(tmp_path / "data", 16))
    manifest = replace(small.make_manifest(plan), tap_layers=(17, 9, 1))
    assert manifest.plan_sha256 == made[1].plan_sha256
    small.create_store(tmp_path / "foreign", manifest, plan, tmp_path / "data")
    small.fill_segment(small.StoreWriter(tmp_path / "foreign", manifest), 0)
    for name in ("hidden/c.0.0.0", "last/c.0.0.0", "commits/00000000.arrow"):
        shutil.copy(tmp_path / "foreign" / name, copy / name)
    if not has_index:
        (copy / "index.arrow").unlink()
        with pytest.raises(UserError, match="belongs to another store"):
            StoreReader(copy)
    writer = small.StoreWriter(copy, made[1])
    with pytest.raises(UserError, match="belongs to another store"):
        writer.committed()
    report = verify(copy)
    assert "belongs to another store" in str(report.faults[0])
    assert report.damaged_segments == [0]
    assert list(repair(copy, report).segments) == [0]
    assert (verify(copy).faults, verify(copy).uncommitted) == ([], [0])
    small.fill_segment(writer, 0)
    assert write_consolidated(copy, made[1].identity_sha256, made[1].num_segments)
    assert {path: data for path, data in small.tree(copy).items() if ".damaged-" not in path} == small.tree(made[0])


def test_a_mark_is_taken_back_by_renaming(copy: Path, made: tuple[Path, Manifest]) -> None:
    flip(copy / "hidden/c.1.0.0", 40)
    path = repair(copy, verify(copy)).segments[1]
    assert path is not None
    flip(copy / "hidden/c.1.0.0", 40)
    path.rename(copy / "commits/00000001.arrow")
    assert write_consolidated(copy, made[1].identity_sha256, made[1].num_segments)
    assert not verify(copy).faults


WRONG_INDEXES: dict[str, tuple[Callable[[Path], object], list[int]]] = {
    "a bit": (lambda store: flip(store / "index.arrow", 700), []),
    "a commit is gone": (lambda store: (store / "commits/00000001.arrow").unlink(), [1]),
}


@pytest.mark.parametrize("name", WRONG_INDEXES)
def test_a_wrong_index_marks_no_segment(
    copy: Path, made: tuple[Path, Manifest], small: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, uncommitted = WRONG_INDEXES[name]
    damage(copy)
    before = small.tree(copy)
    assert run(["verify", str(copy), "--repair"]) == 1
    told = capsys.readouterr().out
    assert "marked" not in told
    assert "removed: index.arrow, kept as" in told
    assert "not repaired here" not in told
    assert f"dflash extract --data DATA --store {copy}" in told
    after = small.tree(copy)
    [aside] = set(after) - set(before)
    assert after == {path: data for path, data in before.items() if path != "index.arrow"} | {
        aside: before["index.arrow"]
    }
    report = verify(copy)
    assert (report.faults, report.uncommitted) == ([], uncommitted)
    small.fill_segments(small.StoreWriter(copy, made[1]), uncommitted)
    assert write_consolidated(copy, made[1].identity_sha256, made[1].num_segments)
    assert {path: data for path, data in small.tree(copy).items() if path != aside} == small.tree(made[0])


def test_a_store_in_use_is_refused_before_anything_is_looked_at(
    copy: Path, small: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report made while another process writes would be repaired after that process is done."""
    flip(copy / "hidden/c.1.0.0", 40)
    before = small.tree(copy)
    with FolderLock(copy):
        assert run(["verify", str(copy), "--repair"]) == 1
        told = capsys.readouterr()
        assert "in use by process" in told.err
        assert told.out == ""
        assert run(["verify", str(copy)]) == 1
        assert "c.1.0.0: segment 1" in capsys.readouterr().out
    assert small.tree(copy) == before


def test_a_folder_that_is_no_store_gets_no_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tmp_path), "--repair"]) == 1
    assert "no store at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 2])
def test_segments_are_counted_in_words(copy: Path, count: int) -> None:
    for number in range(count):
        flip(copy / f"hidden/c.{number}.0.0", 40)
    text = repair(copy, verify(copy)).text()
    assert ("1 segment is to be" if count == 1 else "2 segments are to be") in text


def test_the_printed_command_has_every_setting_of_the_manifest(copy: Path, made: tuple[Path, Manifest]) -> None:
    """The command line of it, read by the command's own parser, gives the settings back."""
    target = made[1].target | {"dtype": "float32"}
    manifest = replace(made[1], target=target, window=20, codec="int8:3", segment_positions=4096)
    store = copy / "it's a store"
    words = shlex.split(next_command(store, manifest))
    assert words[:2] == ["dflash", "extract"]
    with COMMANDS["extract"][0]().make_context("extract", words[2:]) as context:
        config = resolved(ExtractConfig, "extract", dict(context.params))
    assert (config.store, config.taps, config.codec, config.window) == (str(store), (1, 9, 17), "int8:3", 20)
    assert (config.last, config.dtype, config.segment_positions) == (True, "float32", 4096)
    assert next_command(store, replace(manifest, has_last=False, window=None)) == (
        f"dflash extract --data DATA --store {shlex.quote(str(store))} --taps 1,9,17 --codec int8:3 "
        "--set dtype=float32 --set segment_positions=4096"
    )


def run(args: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(args)
    return int(str(left.value.code))


def test_the_command(copy: Path, small: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", str(copy), "--workers", "2"])
    assert "every checksum and every fact holds" in capsys.readouterr().out
    flip(copy / "hidden/c.1.0.0", 40)
    (copy / "frozen/config.json").unlink()
    before = small.tree(copy)
    assert run(["verify", str(copy)]) == 1
    told = capsys.readouterr()
    assert small.tree(copy) == before
    assert "2 faults" in told.out
    assert "--repair" in told.err
    assert run(["verify", str(copy), "--repair"]) == 1
    told = capsys.readouterr()
    assert "marked: segment 1, commit kept as" in told.out
    assert f"dflash extract --data DATA --store {copy} --taps 1,9,17 --codec raw --last" in told.out
    assert "not repaired here:" in told.out
    assert "frozen/config.json' does not exist; to do: run the same extract again" in told.out
    main(["verify", str(copy)])
    assert "not committed: segments 1;" in capsys.readouterr().out


def older_version(store: Path) -> None:
    write_manifest(store, replace(read_manifest(store), version=1))


ADVICES: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest": (lambda store: (store / "zarr.json").unlink(), "to do: copy the file from a backup"),
    "version": (older_version, "to do: use the version of dflash-offline that made the store"),
    "frozen": (lambda store: shutil.rmtree(store / "frozen"), "to do: run the same extract again"),
    "tokens": (lambda store: (store / "plan/tokens-00001.arrow").unlink(), "to do: "),
    "array": (lambda store: (store / "hidden/zarr.json").unlink(), "to do: delete it and run the same extract again"),
}


@pytest.mark.parametrize("name", ADVICES)
def test_where_no_segment_is_damaged_the_advice_is_that_of_the_faults(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = ADVICES[name]
    damage(copy)
    assert run(["verify", str(copy)]) == 1
    told = capsys.readouterr().err.strip().splitlines()
    assert "--repair" not in told[-1]
    assert told[-1].startswith(words), told
    assert len(told[-3:]) == 3
