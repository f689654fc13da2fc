"""`extract --data TABLE`: a user's own token ids, prepared beside the store by prepare's own rules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig, PrepareConfig
from dflash_offline.extract.foretell import plan_command
from dflash_offline.extract.launch import extract
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.ready_ids import prepared_folder, ready_data
from dflash_offline.store.samples import SampleTable

MakeConfig = Callable[..., ExtractConfig]


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Some with prompt_length, some with loss_mask, one with an id that no target has, one without an answer."""
    found: list[dict[str, Any]] = []
    for row in range(count):
        ids = [6 + (row * 17 + place * 3) % 250 for place in range(80 + row)]
        mask = [0] * 9 + [1] * (len(ids) - 9)
        found.append({"input_ids": ids, "prompt_length": 9} if row % 2 else {"input_ids": ids, "loss_mask": mask})
    found[3]["input_ids"][5] = 100_000
    found[5]["prompt_length"] = len(found[5]["input_ids"])
    return found


def table() -> pa.Table:
    schema = pa.schema(
        [
            pa.field("input_ids", pa.list_(pa.int32())),
            pa.field("prompt_length", pa.int64()),
            pa.field("loss_mask", pa.list_(pa.int8())),
        ]
    )
    return pa.Table.from_pylist(rows(), schema=schema)


def write_parquet(folder: Path) -> None:
    pq.write_table(table(), folder / "part-0.parquet")


def write_arrow(folder: Path) -> None:
    with pa.OSFile(str(folder / "part-0.arrow"), "wb") as file, pa.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table())


def write_dataset(folder: Path) -> None:
    """As datasets' save_to_disk lays it out."""
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table().schema) as writer:
        writer.write_table(table())
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))


@pytest.mark.parametrize("write", [write_parquet, write_arrow, write_dataset])
def test_a_table_of_ids_is_prepared_beside_the_store(
    tmp_path: Path,
    case_target: Any,
    make_config: MakeConfig,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
) -> None:
    folder, target = tmp_path / "ids", str(case_target())
    folder.mkdir()
    write(folder)
    config = make_config(folder, tmp_path / "store", target=target)
    made = ready_data(config)
    told = capsys.readouterr().err
    assert made == tmp_path / "store-data"
    assert f"token ids in {folder} prepared into {made}: 10 used, 2 left out" in told
    assert "token id out of range" in told
    assert "no answer" in told
    samples = SampleTable(made)
    expected = [row for number, row in enumerate(rows()) if number not in (3, 5)]
    assert len(samples) == len(expected)
    for number, row in enumerate(expected):
        ids, mask = samples.tokens(number)
        assert ids.tolist() == row["input_ids"]
        assert mask.tolist() == [place >= 9 for place in range(len(ids))]
    by_hand = tmp_path / "by-hand"
    prepare(PrepareConfig(target=target, out=str(by_hand)), [str(folder)])
    assert SampleTable(by_hand).fingerprint() == samples.fingerprint()


def test_extract_takes_it_and_goes_on_with_the_same_command(
    tmp_path: Path, case_target: Any, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()
    write_dataset(folder)
    config = make_config(folder, tmp_path / "store", target=str(case_target()))
    with pytest.raises(UserError, match="not prepared yet, and plan writes nothing"):
        plan_command(config)
    assert not (tmp_path / "store-data").exists()
    assert extract(config).num_ok == 10
    assert plan_command(config).num_samples == 10
    again = extract(config)
    assert (again.num_kept_segments, again.num_new_segments) == (again.num_segments, 0)
    (folder / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(UserError):
        extract(config)


def test_ids_without_a_target_and_folders_of_other_files_are_refused(
    tmp_path: Path, make_config: MakeConfig, case_target: Any
) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()
    write_parquet(folder)
    with pytest.raises(UserError, match="holds token ids, and --target is not given") as caught:
        extract(make_config(folder, tmp_path / "store"))
    assert len(str(caught.value).splitlines()) == 3
    chats = tmp_path / "chats"
    chats.mkdir()
    (chats / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match=r"holds no data\.json"):
        extract(make_config(chats, tmp_path / "store", target=str(case_target())))
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "store-data").exists()


def test_stores_without_a_name_of_their_own(
    tmp_path: Path, make_config: MakeConfig, case_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = tmp_path / "ids", str(case_target())
    folder.mkdir()
    write_parquet(folder)
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    assert ready_data(make_config(folder, Path("."), target=target)) == tmp_path / "here" / "deep-data"
    assert prepared_folder(make_config(folder, Path(".."), target=target)) == tmp_path / "here-data"
    assert prepared_folder(make_config(folder, Path("store"), target=target)) == Path("store-data")
    with pytest.raises(UserError, match="store = '/' has no name") as caught:
        prepared_folder(make_config(folder, Path("/"), target=target))
    assert len(str(caught.value).splitlines()) == 3


def test_a_store_that_cannot_be_is_refused_before_its_samples_are_made(
    tmp_path: Path, make_config: MakeConfig, case_target: Any
) -> None:
    folder, target = tmp_path / "ids", str(case_target())
    folder.mkdir()
    write_parquet(folder)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    for store, told in ((tmp_path / "taken", "holds 'notes.txt' and is no store"), (folder / "hs", "--store")):
        for command in (extract, plan_command):
            with pytest.raises(UserError, match=told) as caught:
                command(make_config(folder, store, target=target))
            assert len(str(caught.value).splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids", "taken"]
    assert [path.name for path in folder.iterdir()] == ["part-0.parquet"]


def broken_datasets(folder: Path) -> dict[str, str]:
    """What is said of each; all of them are in the place of a table."""
    write_dataset(folder / "no-file")
    (folder / "no-file" / "state.json").write_text('{"_data_files": []}')
    (folder / "no-part").mkdir()
    (folder / "no-part" / "dataset_dict.json").write_text('{"splits": []}')
    (folder / "torn.parquet").write_bytes(b"PAR1")
    return {"no-file": "names no data file", "no-part": "names no part", "torn.parquet": "cannot be read"}


def test_tables_that_are_broken_as_a_whole(tmp_path: Path, make_config: MakeConfig, case_target: Any) -> None:
    (tmp_path / "no-file").mkdir()
    for name, told in broken_datasets(tmp_path).items():
        with pytest.raises(UserError, match=told) as caught:
            extract(make_config(tmp_path / name, tmp_path / "store", target=str(case_target())))
        assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "store-data").exists()
