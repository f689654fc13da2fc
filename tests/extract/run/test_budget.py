"""`--budget`: a part of the samples now, more of them later, in one store and with the bytes of one go."""

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
from dflash_offline.extract.foretell import plan_command
from dflash_offline.extract.launch import Dealer, extract, report
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.store.index import committed_segments
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.repair import repair
from dflash_offline.store.samples import SampleTable
from dflash_offline.store.summary import describe_store, read_facts, verify_text

MakeConfig = Callable[..., ExtractConfig]


def hidden_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in (store / "hidden").glob("c.*"))


def budget_of(whole_store: Path, num_segments: int) -> str:
    """What the first segments take, and a byte less than the next one more."""
    sizes = [(whole_store / "hidden" / f"c.{segment}.0.0").stat().st_size for segment in range(num_segments + 1)]
    return str(sum(sizes) - 1)


@pytest.fixture
def part(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> Path:
    """A store of the first seven segments."""
    extract_here(make_config(data, tmp_path / "part", budget=budget_of(whole_store, 7)))
    return tmp_path / "part"


def test_a_budget_records_the_first_samples_by_content(part: Path, data: Path, whole_store: Path) -> None:
    assert committed_segments(part) == set(range(7))
    assert hidden_bytes(part) <= int(budget_of(whole_store, 7))
    reader, whole = StoreReader(part), StoreReader(whole_store)
    content = SampleTable(data).column("content")
    expected = np.argsort(content)[: len(reader)]
    assert reader.samples.sample_id.tolist() == expected.tolist() == whole.samples.sample_id[: len(reader)].tolist()
    assert 0 < len(reader) < len(whole)


def test_a_store_of_a_budget_is_complete_for_its_readers(part: Path) -> None:
    facts = read_facts(part)
    assert facts.is_finished
    assert "complete for its budget" in describe_store(facts)
    found = verify(part)
    assert not found.faults
    assert "`dflash extract` with a larger --budget records them" in verify_text(found)
    (part / "index.arrow").unlink()
    with pytest.raises(UserError, match="is not complete"):
        StoreReader(part)
    assert "unfinished" in describe_store(read_facts(part))
    assert "the same `dflash extract` records them" in verify_text(verify(part))


def test_the_command_of_a_repair_asks_for_what_was_there(part: Path, data: Path, content: Any) -> None:
    before = content(part)
    path = part / "hidden" / "c.2.0.0"
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    words = shlex.split(repair(part, verify(part)).command)
    main([*(str(data) if word == "DATA" else word for word in words[1:]), "--devices", "cpu", "--token-budget", "600"])
    assert {path: sha for path, sha in content(part).items() if ".damaged-" not in path} == before


def test_a_larger_budget_goes_on_where_the_smaller_one_ended(
    part: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    extract_here: Callable[..., Survey],
    content: Callable[[Path], dict[str, str]],
) -> None:
    """Seven segments, then eleven, then all: nothing is recorded twice, and the bytes are those of one go."""
    before = {path: path.stat().st_mtime_ns for path in (part / "hidden").glob("c.*")}
    num_before = len(StoreReader(part))
    extract_here(make_config(data, part, budget=budget_of(whole_store, 11)))
    assert len(StoreReader(part)) > num_before
    assert committed_segments(part) == set(range(11))
    extract_here(make_config(data, part))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert content(part) == content(whole_store)


def test_a_budget_may_end_inside_a_group(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig, extract_here: Any, content: Any
) -> None:
    """Batches are those of the whole group, whatever of it fits: four segments a group, seven of them now."""
    lines = [
        {"input_ids": [6 + (line * 31 + place * place) % 250 for place in range(20 + line % 40)], "prompt_length": 3}
        for line in range(66)
    ]
    data = make_data(lines, case_target())
    settings: dict[str, Any] = {"segment_positions": 64, "token_budget": 200}
    whole = extract_here(make_config(data, tmp_path / "whole", **settings))
    assert len(whole.groups[0]) == 4
    budget = budget_of(tmp_path / "whole", 7)
    found = extract_here(make_config(data, tmp_path / "part", budget=budget, **settings))
    assert (found.num_asked, found.own_segments) == (7, [range(7)])
    extract_here(make_config(data, tmp_path / "part", **settings))
    assert content(tmp_path / "part") == content(tmp_path / "whole")


def test_a_smaller_budget_later_takes_nothing_away(
    part: Path, data: Path, whole_store: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str], content: Any
) -> None:
    before = content(part)
    done = extract(make_config(data, part, budget=budget_of(whole_store, 3)))
    assert (done.num_segments, done.num_new_segments, done.num_missing) == (7, 0, 0)
    assert "4 segments beyond the budget were committed before; they stay" in capsys.readouterr().err
    assert content(part) == before


def test_the_report_says_what_stays_outside(part: Path, data: Path, whole_store: Path, make_config: MakeConfig) -> None:
    found = survey(make_config(data, part, budget=budget_of(whole_store, 7)))
    text = report(Dealer(found, set(range(7))), 1.0).text()
    outside = len(StoreReader(whole_store)) - len(StoreReader(part))
    assert f"{outside} samples do not fit the budget; a larger --budget goes on from here" in text
    assert text.splitlines()[-1] == f"next: dflash train --store {part}"


def test_plan_counts_inside_and_outside(
    tmp_path: Path, part: Path, data: Path, whole_store: Path, make_config: MakeConfig
) -> None:
    budget = budget_of(whole_store, 7)
    said, reader, whole = (
        plan_command(make_config(data, tmp_path / "new", budget=budget)),
        *map(StoreReader, (part, whole_store)),
    )
    assert (said.num_asked, said.num_asked_samples) == (7, len(reader))
    assert said.num_asked_tokens == sum(len(reader.tokens(i)[0]) for i in range(len(reader)))
    assert said.codec_bytes["raw"] == hidden_bytes(part)
    actual = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    assert actual <= said.store_bytes <= actual + 300_000
    text = said.text()
    assert f"{len(reader)} samples of {said.num_asked_tokens:,} tokens inside" in text
    assert f"{len(whole) - len(reader)} of " in text
    assert "tokens outside" in text
    assert f"--budget {budget}" in text.splitlines()[-1]


def test_zstd_is_reckoned_with_the_most_it_takes(
    tmp_path: Path, data: Path, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> None:
    """No one knows less before the states are written; so the budget holds, and what it leaves is filled later."""
    raw = plan_command(make_config(data, tmp_path / "raw")).codec_bytes["raw"]
    config = make_config(data, tmp_path / "zstd", codec="zstd", budget=str(raw // 2))
    assert "reckoned with the most that zstd takes" in plan_command(config).text()
    extract_here(config)
    assert 0 < hidden_bytes(tmp_path / "zstd") < raw // 2


def test_a_budget_is_no_part_of_the_identity_and_must_be_a_size(
    tmp_path: Path, part: Path, data: Path, whole_store: Path, make_config: MakeConfig
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(whole_store, copied)
    planned = plan_command(make_config(data, copied, budget="1GB"))
    assert planned.num_committed == planned.num_asked == planned.num_segments
    with pytest.raises(UserError, match="'20 TBs' is not a size"):
        make_config(data, part, budget="20 TBs")
