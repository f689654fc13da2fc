"""An append-only file of what became of each input line, in the order in which it came about.

One record a line: `CRC32 SOURCE NUMBER OUTCOME JSON`, the checksum over all that follows it; the first holds the facts
of the run. A kill or a power cut leaves at most a torn tail, which the next start cuts off: a line is done
when its whole record is there, and is done again otherwise. A record that a disk damaged is passed over, and those
behind it hold. Knows no chats and no servers.
"""

import json
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ... import UserError
from ...progress import say
from ...store.files import fsync_folder, storage_error, write_all

OUTCOMES = ("answered", "failed", "skipped")
UNKNOWN, FAILED, NEWLINE = 0, OUTCOMES.index("failed") + 1, b"\n"


class Journal:
    """Where each line's record lies; memory: nine bytes a line. The folder's lock is the caller's.

    `retry_failed`: lines that failed count as not done. Raises UserError where the file cannot be written.
    """

    def __init__(self, path: Path, facts: dict[str, Any], num_sources: int, *, retry_failed: bool = False) -> None:
        self.path = path
        self.places = [array("q") for _ in range(num_sources)]  # offset of a line's record
        self.outcomes = [bytearray() for _ in range(num_sources)]  # place in OUTCOMES + 1, or UNKNOWN
        self.counts: Counter[str] = Counter()
        try:
            is_new = read_facts(path) is None
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_new else 0), 0o666)
            self.size_bytes = 0
            if is_new:
                self.write(record_line(0, 0, "facts", facts))
                self.sync()
                fsync_folder(path.parent)
            else:
                self.read(retry_failed)
        except OSError as error:
            raise storage_error(error, path) from error

    def read(self, retry_failed: bool) -> None:
        """Finds the last whole record of every line, and cuts the file behind the last of all."""
        num_damaged = num_pending = 0  # broken lines before a whole record, and those behind the last one
        with self.path.open("rb") as file:
            self.size_bytes = place = len(file.readline())
            for line in file:
                parts = checked(line)
                if parts is None:
                    num_pending += 1
                else:
                    if num_pending:
                        self.forget_failed()
                        num_damaged, num_pending = num_damaged + num_pending, 0
                    source, number, outcome = int(parts[0]), int(parts[1]), parts[2].decode()
                    if not (retry_failed and outcome == "failed"):
                        self.note(source, number, outcome, place)
                    self.size_bytes = place + len(line)
                place += len(line)
        if num_damaged:
            say(f"{self.path}: {num_damaged:,} damaged records are passed over, their lines are asked again")
        torn_bytes = os.fstat(self.fd).st_size - self.size_bytes
        if torn_bytes:
            say(f"{self.path}: {torn_bytes:,} bytes of a record that was not finished are cut off")
            os.ftruncate(self.fd, self.size_bytes)
            os.fsync(self.fd)

    def note(self, source: int, number: int, outcome: str, place: int) -> None:
        places, outcomes = self.places[source], self.outcomes[source]
        if number >= len(places):
            places.extend([0] * (number + 1 - len(places)))
            outcomes.extend(bytes(number + 1 - len(outcomes)))
        if outcomes[number]:
            self.counts[OUTCOMES[outcomes[number] - 1]] -= 1
        places[number], outcomes[number] = place, OUTCOMES.index(outcome) + 1
        self.counts[outcome] += 1

    def forget_failed(self) -> None:
        """Before a damaged record: it may say that one of these was answered in a later try."""
        for outcomes in self.outcomes:
            for number, outcome in enumerate(outcomes):
                if outcome == FAILED:
                    outcomes[number] = UNKNOWN
        del self.counts["failed"]

    def has(self, source: int, number: int) -> bool:
        return number < len(self.outcomes[source]) and self.outcomes[source][number] != UNKNOWN

    def add(self, source: int, number: int, outcome: str, record: dict[str, Any]) -> None:
        """Appends one line's record: with the system when this returns, on the disk after `sync`."""
        place = self.size_bytes
        try:
            self.write(record_line(source, number, outcome, record))
        except OSError as error:
            raise storage_error(error, self.path, safe="every line answered before stays safe") from error
        self.note(source, number, outcome, place)

    def write(self, line: bytes) -> None:
        write_all(self.fd, [memoryview(line)])
        self.size_bytes += len(line)

    def sync(self) -> None:
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Outcome and record of every line that is done, in input order."""
        with self.path.open("rb") as file:
            for places, outcomes in zip(self.places, self.outcomes):
                for number, outcome in enumerate(outcomes):
                    if outcome != UNKNOWN:
                        yield OUTCOMES[outcome - 1], record_at(file, self.path, places[number])

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def record_line(source: int, number: int, outcome: str, record: dict[str, Any]) -> bytes:
    body = f"{source} {number} {outcome} ".encode() + as_json(record)
    return b"%08x " % zlib.crc32(body) + body + NEWLINE


def as_json(value: Any) -> bytes:
    """JSON as UTF-8; a value that holds lone surrogates, which have no UTF-8, in ASCII escapes.

    Raises ValueError or TypeError for what JSON does not hold: NaN, infinity, times, bytes.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def checked(line: bytes) -> list[bytes] | None:
    """Source, number, outcome and JSON of a whole record, None for anything else."""
    if not line.endswith(NEWLINE) or line[8:9] != b" ":
        return None
    body = line[9:-1]
    parts = body.split(b" ", 3)
    return parts if line[:8] == b"%08x" % zlib.crc32(body) and len(parts) == 4 else None


def record_at(file: BinaryIO, path: Path, place: int) -> dict[str, Any]:
    file.seek(place)
    parts = checked(file.readline())
    if parts is None:
        raise UserError(
            f"{str(path)!r} changed while it was read, at byte {place}", "the file as it was written", "check the disk"
        )
    return json.loads(parts[3])


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts that a journal was begun with; None where there is none, or it ends within its first record.

    Raises UserError for a first record that is damaged: those behind it may hold answers.
    """
    try:
        with path.open("rb") as file:
            first = file.readline()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path) from error
    if not first.endswith(NEWLINE):
        return None
    parts = checked(first)
    if parts is None or parts[2] != b"facts":
        raise UserError(
            f"{str(path)!r} is damaged: its first record does not hold the facts of the run",
            "a journal as `dflash regenerate` wrote it",
            "bring back a copy of it, or choose another --out; to remove it gives up the answers in it",
        )
    return json.loads(parts[3])
