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
from dflash_offline.extract.ready_ids import ready_data
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
