"""One file of token ids and loss masks: its schema, its names, its checksums, and how it is written.

An Arrow IPC file of record batches of about a thousand samples, so that a reader maps it and
touches only what it looks up. Two checksums cover it: one per sample for its ids and mask, checked
at each look-up, and one of the file for all the rest, checked before Arrow parses it (a flipped bit
in Arrow's own metadata ends the process). This file knows no folder and no rule about masks.
"""

import hashlib
import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from .arrow_file import CHECKSUM_KEY, checksum, is_intact
from .checksum import crc32c
from .files import NewFile, unreadable

TOKENS_NAME = re.compile(r"tokens-(\d{5,})\.arrow")
BATCH_SAMPLES = 1000
BATCH_TOKENS = 4_000_000  # a batch ends early here, so that long samples do not pile up in memory
MAX_BATCHES = 128
RANGE = "{:012d}+{:010d} "  # offset and bytes of ids or masks that the file's checksum leaves out
RANGES_WIDTH = len(RANGE.format(0, 0)) * 2 * MAX_BATCHES
CHECKED = re.compile(rb"crc32c:([0-9a-f]{8}) except:([0-9+ ]{%d})" % RANGES_WIDTH)
UNKNOWN = f"crc32c:00000000 except:{'':{RANGES_WIDTH}}"
WINDOW_BYTES = 2**16  # the checksum stands in the first and in the last of these
TEXT_COLUMNS = ("split", "task", "source", "origin")
DICTIONARY = pa.dictionary(pa.int32(), pa.string())

TOKENS_SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.list_(pa.uint32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("split", DICTIONARY, nullable=False),
        pa.field("task", DICTIONARY, nullable=False),
        pa.field("source", DICTIONARY, nullable=False),
        pa.field("origin", DICTIONARY, nullable=False),
        pa.field("source_line", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("num_recorded", pa.int32(), nullable=False),
        pa.field("content", pa.uint64(), nullable=False),
        pa.field("crc32c", pa.uint32(), nullable=False),
    ]
)


def tokens_name(number: int) -> str:
    return f"tokens-{number:05d}.arrow"


def tokens_paths(folder: Path) -> dict[int, Path]:
    """The token files of a folder by number, in order; temporaries are not among them."""
    found = ((TOKENS_NAME.fullmatch(path.name), path) for path in folder.glob("tokens-*.arrow"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def tokens_crc(token_ids: np.ndarray, loss_mask: np.ndarray) -> int:
    """crc32c over the ids (u32, little endian), then the mask (u8, 0 or 1)."""
    return crc32c(loss_mask, crc32c(token_ids))


def content_sha256(token_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """What a sample is: sha256 over the ids (u32, little endian), then the mask (u8, 0 or 1).

    The column `content` is its first 8 bytes, little endian.
    """
    return hashlib.sha256(token_ids.tobytes() + loss_mask.tobytes()).digest()


def is_sound(data: memoryview) -> bool:
    """True where everything in a token file but the ids and masks of large batches is as written."""
    size = len(data)
    windows = [(0, size)] if size <= 2 * WINDOW_BYTES else [(0, WINDOW_BYTES), (size - WINDOW_BYTES, size)]
    found = [(match, first) for first, last in windows for match in CHECKED.finditer(data[first:last])]
    if not found or len({match[2] for match, _ in found}) != 1:
        return False
    ranges = [tuple(map(int, text.split(b"+"))) for text in found[0][0][2].split()]
    places = [(match[1], first + match.start(1)) for match, first in found]
    return all(len(pair) == 2 for pair in ranges) and is_intact(data, places, [(pair[0], pair[1]) for pair in ranges])


def require_short(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """The metadata, which must leave the schema small enough for its checksum to be found in the first window."""
    size = sum(len(key) + len(value) for key, value in metadata.items())
    assert size <= WINDOW_BYTES // 2, f"{size} bytes of metadata, at most {WINDOW_BYTES // 2}"
    return metadata


def file_checksum(path: Path) -> str:
    """The digits of a token file's own checksum, which tell it from any other; '' where it has none. Checks nothing."""
    try:
        with path.open("rb") as file:
            match = CHECKED.search(file.read(WINDOW_BYTES))
    except OSError as error:
        raise unreadable(error, path) from error
    return match[1].decode() if match else ""


class TokensSink:
    """What Arrow writes to: passes bytes on and notes where the checksum and the large buffers lie."""

    def __init__(self, file: NewFile) -> None:
        self.file = file
        self.awaited: list[int] = []  # bytes of the large buffers that come next
        self.left_out: list[tuple[int, int]] = []
        self.places: list[int] = []

    @property
    def closed(self) -> bool:
        return self.file.closed

    def write(self, data: "pa.Buffer | bytes") -> int:
        view, offset = memoryview(data), self.file.size_bytes
        if self.awaited and len(view) == self.awaited[0]:
            self.left_out.append((offset, self.awaited.pop(0)))
        elif len(view) < WINDOW_BYTES:
            self.places += [offset + match.start() for match in CHECKED.finditer(view)]
        return self.file.write(view)

    def finish(self) -> None:
        """Fills in the ranges left out, then the checksum, and publishes the file."""
        self.fill_in("00000000")
        with open(self.file.temporary, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            places = [place + len("crc32c:") for place in self.places]
            digits = f"{checksum(memoryview(data), places, self.left_out):08x}"
        self.fill_in(digits)
        self.file.finish()

    def fill_in(self, digits: str) -> None:
        ranges = "".join(RANGE.format(offset, size) for offset, size in self.left_out)
        for place in self.places:
            self.file.patch(place, f"crc32c:{digits} except:{ranges:{RANGES_WIDTH}}".encode())


@dataclass(frozen=True)
class SampleRun:
    """Samples that were made before, one behind another, and what a token file says of each."""

    ids: np.ndarray  # [T] u32
    mask: np.ndarray  # [T] u8 of 0 and 1
    lengths: np.ndarray  # [n] i64, of the samples; at least 1
    num_recorded: np.ndarray  # [n]
    contents: np.ndarray  # [n] u64
    crc32c: np.ndarray  # [n]
    texts: Sequence[tuple[str, ...]]  # [n], of each its `TEXT_COLUMNS`
    source_lines: Sequence[int]  # [n]

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Tokens before each sample, and all of them at the end [n + 1] i64."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)


class TokensFile:
    """One token file while it is written: batches of about a thousand samples."""

    def __init__(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        self.sink = TokensSink(NewFile(path))
        self.num_batches = 0
        self.names: tuple[dict[str, int], ...] = tuple({} for _ in TEXT_COLUMNS)
        self.codes: dict[tuple[str, ...], tuple[int, ...]] = {}  # of texts that came together before
        self.num_rows = 0
        self.clear()
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        schema = TOKENS_SCHEMA.with_metadata({CHECKSUM_KEY: UNKNOWN, **require_short(metadata or {})})
        self.writer = pa.ipc.new_file(self.sink, schema, options=options)

    def clear(self) -> None:
        self.ids: list[np.ndarray] = []  # of a sample or of several, one behind another
        self.masks: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.texts: list[tuple[int, ...]] = []
        self.numbers: list[tuple[int, int, int, int]] = []
        self.num_tokens = 0

    def add(
        self, ids: np.ndarray, mask: np.ndarray, texts: tuple[str, ...], numbers: tuple[int, int, int, int]
    ) -> None:
        """Takes one sample: ids [S] u32, mask [S] u8 of 0 and 1, texts = its `TEXT_COLUMNS`.

        `numbers` are its source_line, num_recorded, content and crc32c.
        """
        self.ids.append(ids)
        self.masks.append(mask)
        self.lengths.append(len(ids))
        self.texts.append(self.codes_of(texts))
        self.numbers.append(numbers)
        self.count(1, len(ids))

    def add_run(self, run: SampleRun, first: int, most: int) -> int:
        """Takes samples of a run from number `first` on, as `add` takes each; how many: up to `most`, and up to the
        end of the record batch."""
        starts, missing = run.starts, BATCH_TOKENS - self.num_tokens
        enough = int(np.searchsorted(starts, starts[first] + missing))  # with the sample before it the batch is full
        last = min(first + most, first + BATCH_SAMPLES - len(self.lengths), enough, len(run))
        tokens, own = slice(int(starts[first]), int(starts[last])), slice(first, last)
        self.ids.append(run.ids[tokens])
        self.masks.append(run.mask[tokens])
        self.lengths += run.lengths[own].tolist()
        self.texts += map(self.codes_of, run.texts[own])
        columns = (values[own].tolist() for values in (run.num_recorded, run.contents, run.crc32c))
        self.numbers += zip(run.source_lines[own], *columns)
        self.count(last - first, tokens.stop - tokens.start)
        return last - first

    def codes_of(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        codes = self.codes.get(texts)
        if codes is None:
            codes = tuple(names.setdefault(text, len(names)) for names, text in zip(self.names, texts))
            self.codes[texts] = codes
        return codes

    def count(self, num_rows: int, num_tokens: int) -> None:
        """Counts what was taken; writes it where that fills a record batch."""
        self.num_rows += num_rows
        self.num_tokens += num_tokens
        if len(self.lengths) == BATCH_SAMPLES or self.num_tokens >= BATCH_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Writes the samples held so far as one record batch."""
        if not self.lengths:
            return
        lengths = np.array(self.lengths, dtype=np.int32)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        codes = np.array(self.texts, dtype=np.int32)  # [samples, 4]
        lines, recorded, contents, crcs = zip(*self.numbers)
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self.ids))),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self.masks))),
            *(pa.DictionaryArray.from_arrays(codes[:, i], pa.array(list(names))) for i, names in enumerate(self.names)),
            pa.array(np.array(lines, dtype=np.int64)),
            pa.array(lengths),
            pa.array(np.array(recorded, dtype=np.int32)),
            pa.array(np.array(contents, dtype=np.uint64)),
            pa.array(np.array(crcs, dtype=np.uint32)),
        ]
        if self.num_tokens > 8 * (len(lengths) + 1):  # then no other buffer is as long as these two
            self.sink.awaited = [4 * self.num_tokens, self.num_tokens]
        self.writer.write_batch(pa.record_batch(columns, schema=TOKENS_SCHEMA))
        self.num_batches += 1
        self.clear()

    def finish(self) -> None:
        """Publishes the file under its final name."""
        self.flush()
        self.writer.close()
        self.sink.finish()

    @property
    def is_full(self) -> bool:
        """True where no further batch would find room for its ranges."""
        return self.num_batches == MAX_BATCHES

    def abort(self) -> None:
        self.sink.file.abort()
