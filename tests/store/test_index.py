"""The plan and the commits as checked Arrow files."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from dflash_offline import UserError
from dflash_offline.store import index
from dflash_offline.store.arrow_file import read_table, write_table

SHA = "5" * 64


@pytest.fixture
def plan(tmp_path: Path, small: ModuleType) -> pa.Table:
    return small.make_plan(small.make_samples(tmp_path / "data", 12))


def commit_table(segment: int) -> pa.Table:
    values = {
        "sample_id": [2 * segment, 2 * segment + 1],
        "segment": [segment] * 2,
        "position": [0, 64],
        "n": [60, 5],
        "crc32c": [segment + 7, 2**32 - 1],
        "last_crc32c": [0, 0],
        "status": [0, 1],
    }
    return pa.table([pa.array(values[f.name], f.type) for f in index.COMMIT_SCHEMA], schema=index.COMMIT_SCHEMA)


def write_commits(folder: Path, segments: list[int]) -> None:
    (folder / "commits").mkdir(exist_ok=True)
    for segment in segments:
        metadata = {"identity_sha256": SHA, "file_bytes": f"[{segment + 1000}]", "host": "box"}
        index.write_commit(folder, segment, commit_table(segment), metadata)


def test_the_plan_comes_back_with_its_hash(tmp_path: Path, plan: pa.Table) -> None:
    (tmp_path / "plan").mkdir()
    sha256 = index.write_plan(tmp_path, plan, 512)
    back = index.read_plan(tmp_path, sha256)
    assert back.to_pylist() == plan.to_pylist()
    assert index.plan_sha256(back, 512) == sha256
    with pytest.raises(UserError, match="was made for plan"):
        index.read_plan(tmp_path, SHA)


def test_the_plan_hash_is_about_content_only(plan: pa.Table) -> None:
    sha256 = index.plan_sha256(plan, 512)
    pieces = [plan.slice(0, 5), plan.slice(5)]
    recoded = []
    for piece in pieces:
        columns = []
        for field in piece.schema:
            column = piece.column(field.name)
            if pa.types.is_dictionary(field.type):
                texts = ["unused", *reversed(sorted(set(column.to_pylist())))]
                codes = pa.array([texts.index(text) for text in column.to_pylist()], pa.int32())
                column = pa.DictionaryArray.from_arrays(codes, pa.array(texts))
            columns.append(column)
        recoded.append(pa.table(columns, schema=piece.schema))
    assert index.plan_sha256(pa.concat_tables(recoded), 512) == sha256
    assert index.plan_sha256(plan, 1024) != sha256
    for name in ("n", "first", "source_line", "task"):
        number = plan.schema.get_field_index(name)
        changed = plan.column(name).to_pylist()
        changed[3] = "else" if name == "task" else changed[3] + 1
        column = (
            pa.array(changed).dictionary_encode() if name == "task" else pa.array(changed, plan.schema[number].type)
        )
        assert index.plan_sha256(plan.set_column(number, plan.schema[number], column), 512) != sha256


@pytest.mark.parametrize(
    "name, row, value, rule",
    [
        ("position", 1, 32, "multiples of 64"),
        ("position", 1, 0, "overlap"),
        ("segment", 11, 99, "segments lie"),
        ("n", 0, 0, "at least 1"),
        ("n", 11, 513, "straddles"),
        ("first", 3, -1, "every first"),
        ("sample_id", 0, 105, "differ"),
        ("segment", 0, 2, "sorted"),
    ],
)
def test_a_plan_that_breaks_the_format_is_refused(plan: pa.Table, name: str, row: int, value: int, rule: str) -> None:
    num_segments = max(plan["segment"].to_pylist()) + 1
    index.check_plan(plan, 512, num_segments)
    changed = plan.column(name).to_pylist()
    changed[row] = value
    number = plan.schema.get_field_index(name)
    broken = plan.set_column(number, plan.schema[number], pa.array(changed, plan.schema[number].type))
    with pytest.raises(ValueError, match=rule):
        index.check_plan(broken, 512, num_segments)


def test_commits_come_back_by_segment(tmp_path: Path) -> None:
    write_commits(tmp_path, [3, 0, 10])
    commits = index.read_commits(tmp_path, SHA)
    assert commits.segments == {0: (1000,), 3: (1003,), 10: (1010,)}
    assert commits.table.to_pylist() == [row for k in (0, 3, 10) for row in commit_table(k).to_pylist()]
    assert index.committed_segments(tmp_path) == {0, 3, 10}


def test_commits_of_another_store_or_under_a_wrong_name_are_refused(tmp_path: Path) -> None:
    write_commits(tmp_path, [0])
    assert index.write_consolidated(tmp_path, SHA, 1)
    for read in (index.read_commits, index.read_consolidated):
        with pytest.raises(UserError, match=f"belongs to another store, one with identity {SHA}") as caught:
            read(tmp_path, "6" * 64)
        assert f"identity {'6' * 64}" in caught.value.expected
        assert len(str(caught.value).splitlines()) == 3
    index.commit_path(tmp_path, 0).rename(index.commit_path(tmp_path, 1))
    with pytest.raises(UserError, match=r"00000001\.arrow.*segment 0, not 1"):
        index.read_commits(tmp_path, SHA)


def test_the_same_commit_gives_the_same_bytes(tmp_path: Path) -> None:
    write_commits(tmp_path, [4])
    first = index.commit_path(tmp_path, 4).read_bytes()
    write_commits(tmp_path, [4])
    assert index.commit_path(tmp_path, 4).read_bytes() == first


def test_a_flipped_bit_anywhere_in_a_commit_is_noticed(tmp_path: Path) -> None:
    write_commits(tmp_path, [0])
    path = index.commit_path(tmp_path, 0)
    data = path.read_bytes()
    for place in range(0, len(data), 5):  # all of them were tried once: 7 s
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(UserError, match=r"00000000\.arrow"):
            index.read_commits(tmp_path, SHA)


@pytest.mark.parametrize("length", [0, 1, 500, -1])
def test_a_truncated_commit_is_noticed(tmp_path: Path, length: int) -> None:
    write_commits(tmp_path, [0])
    path = index.commit_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=r"00000000\.arrow.*checksum"):
        index.read_commits(tmp_path, SHA)


def test_the_consolidated_index_holds_what_the_commits_hold(tmp_path: Path) -> None:
    write_commits(tmp_path, [0, 1, 2])
    assert index.read_consolidated(tmp_path, SHA) is None
    assert not index.write_consolidated(tmp_path, SHA, 4)
    assert not (tmp_path / "index.arrow").exists()
    (tmp_path / "index.arrow.tmp.box.1").touch()
    assert index.write_consolidated(tmp_path, SHA, 3)
    found, expected = index.read_consolidated(tmp_path, SHA), index.read_commits(tmp_path, SHA)
    assert found is not None
    assert found.table.equals(expected.table)
    assert found.segments == expected.segments
    assert sorted(path.name for path in tmp_path.glob("index*")) == ["index.arrow"]
    index.forget_consolidated(tmp_path)
    assert index.read_consolidated(tmp_path, SHA) is None


def test_an_arrow_file_is_readable_by_anyone(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array(np.arange(3), pa.int64())})
    write_table(tmp_path / "a.arrow", table, {"key": "value"})
    assert pa.ipc.open_file(str(tmp_path / "a.arrow")).read_all().to_pylist() == table.to_pylist()
    back, metadata = read_table(tmp_path / "a.arrow", table.schema)
    assert back.equals(table)
    assert metadata["key"] == "value"
    with pytest.raises(UserError, match="columns"):
        read_table(tmp_path / "a.arrow", pa.schema([("b", pa.int64())]))
    with pytest.raises(UserError, match="does not exist"):
        read_table(tmp_path / "b.arrow", table.schema)
    with pytest.raises(ValueError, match="checksum"):
        write_table(tmp_path / "a.arrow", table, {"note": "crc32c:0123abcd"})
