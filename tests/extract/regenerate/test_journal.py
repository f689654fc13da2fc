"""The journal: each line's last whole record, whatever tore the file."""

from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.regenerate.journal import Journal, read_facts

FACTS = {"model": "small", "sources": ["a", "b"]}


def fill(path: Path) -> list[tuple[int, int, str, dict[str, Any]]]:
    lines = [
        (0, 3, "answered", {"row": "three"}),
        (1, 1, "failed", {"row": "one of b"}),
        (0, 1, "skipped", {"row": "\u2028 line separator, \ud800 surrogate, \u00e9"}),
        (0, 2, "answered", {"row": "two"}),
    ]
    journal = Journal(path, FACTS, 2)
    for line in lines:
        journal.add(*line)
    journal.close()
    return lines


def content(journal: Journal) -> list[tuple[str, dict[str, Any]]]:
    found = list(journal.records())
    journal.close()
    return found


def test_records_come_in_input_order(tmp_path: Path) -> None:
    lines = fill(tmp_path / "journal")
    assert read_facts(tmp_path / "journal") == FACTS
    journal = Journal(tmp_path / "journal", FACTS, 2)
    assert journal.has(0, 3)
    assert not journal.has(0, 4)
    assert not journal.has(1, 0)
    assert journal.counts == {"answered": 2, "failed": 1, "skipped": 1}
    assert content(journal) == [line[2:] for line in sorted(lines, key=lambda line: line[:2])]


@pytest.mark.parametrize("tail", [b"", b"\0" * 4096, b"garbage\n", b"deadbeef 0 9 answered {}\n"])
def test_cut_anywhere_it_holds_the_whole_records(tail: bytes, tmp_path: Path) -> None:
    lines = fill(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    path = tmp_path / "journal"
    for size in range(ends[0], len(data) + 1):
        path.write_bytes(data[:size] + tail)
        journal = Journal(path, FACTS, 2)
        num_whole = sum(end <= size for end in ends) - 1
        assert content(journal) == [line[2:] for line in sorted(lines[:num_whole], key=lambda line: line[:2])]
        assert path.read_bytes() == data[: ends[num_whole]]


def test_without_its_first_record_it_begins_anew(tmp_path: Path) -> None:
    fill(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for size in range(data.index(b"\n") + 1):
        path.write_bytes(data[:size])
        assert read_facts(path) is None
        assert content(Journal(path, FACTS, 2)) == []
        assert path.read_bytes() == data[: data.index(b"\n") + 1]


def test_failed_lines_can_be_forgotten_and_done_again(tmp_path: Path) -> None:
    fill(tmp_path / "journal")
    journal = Journal(tmp_path / "journal", FACTS, 2, retry_failed=True)
    assert not journal.has(1, 1)
    journal.add(1, 1, "answered", {"row": "at last"})
    journal.close()
    journal = Journal(tmp_path / "journal", FACTS, 2)
    assert journal.counts == {"answered": 3, "skipped": 1, "failed": 0}
    assert content(journal)[-1] == ("answered", {"row": "at last"})


def test_a_byte_that_changes_under_it_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    fill(path)
    journal = Journal(path, FACTS, 2)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"three", b"thref"))
    with pytest.raises(UserError, match="changed while it was read"):
        list(journal.records())
    journal.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        Journal(tmp_path / "nowhere" / "journal", FACTS, 1)
