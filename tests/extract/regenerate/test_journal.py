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


@pytest.mark.parametrize("damage", ["flip", "no newline", "not the facts", "zeros"])
def test_a_damaged_first_record_is_refused_and_nothing_is_wiped(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    fill(path)
    data = path.read_bytes()
    end = data.index(b"\n")
    path.write_bytes(
        {
            "flip": data[:20] + bytes([data[20] ^ 1]) + data[21:],
            "no newline": data[:end] + b" " + data[end + 1 :],
            "not the facts": data[end + 1 :],
            "zeros": bytes(end + 1) + data[end + 1 :],
        }[damage]
    )
    before = path.read_bytes()
    for attempt in (lambda: read_facts(path), lambda: Journal(path, FACTS, 2)):
        with pytest.raises(UserError, match="journal' is damaged: its first record") as error:
            attempt()
        assert len(str(error.value).splitlines()) == 3
    assert path.read_bytes() == before


def test_a_damaged_record_costs_its_own_line_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every record in turn but the last, whose damage cannot be told from a torn end."""
    lines = fill(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    starts = [place + 1 for place, byte in enumerate(data) if byte == 10][:-1]
    path = tmp_path / "journal"
    for damaged, start in enumerate(starts[:-1]):
        for place in (start, start + 12, starts[damaged + 1] - 2):
            path.write_bytes(data[:place] + b"\n" + data[place + 1 :])
            before = path.read_bytes()
            lost = {damaged} | {number for number in range(damaged) if lines[number][2] == "failed"}
            journal = Journal(path, FACTS, 2)
            assert "damaged records are passed over" in capsys.readouterr().err
            assert [journal.has(*line[:2]) for line in lines] == [number not in lost for number in range(len(lines))]
            for number in lost:
                journal.add(*lines[number])
            assert content(journal) == [line[2:] for line in sorted(lines, key=lambda line: line[:2])]
            assert path.read_bytes().startswith(before), "what is there stays as it is"
            journal = Journal(path, FACTS, 2)
            assert journal.counts.total() == len(lines)
            journal.close()


def test_lines_that_failed_before_a_damaged_record_are_asked_again(tmp_path: Path) -> None:
    """The damaged record may have been the answer of a later try."""
    path = tmp_path / "journal"
    fill(path)
    start = path.stat().st_size
    journal = Journal(path, FACTS, 2, retry_failed=True)
    journal.add(1, 1, "answered", {"row": "at last"})
    journal.add(0, 4, "failed", {"row": "four"})
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[: start + 20] + b"X" + data[start + 21 :])
    journal = Journal(path, FACTS, 2)
    assert (journal.has(1, 1), journal.has(0, 4)) == (False, True)
    assert journal.counts == {"answered": 2, "skipped": 1, "failed": 1}
    journal.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x"])
def test_what_json_does_not_hold_is_not_written(value: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", FACTS, 2)
    with pytest.raises((ValueError, TypeError)):
        journal.add(0, 1, "answered", {"row": value})
    assert content(journal) == []


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
