"""Samples before any state is recorded: token ids and loss masks, streamed in, looked up by row.

This file owns what an eligible anchor is. It knows no chat, no tokenizer and no plan.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from .. import UserError
from .files import disk_errors, remove
from .mapped_tokens import MappedTokens
from .tokens_file import (
    TEXT_COLUMNS,
    TOKENS_SCHEMA,
    SampleRun,
    TokensFile,
    content_sha256,
    tokens_crc,
    tokens_name,
    tokens_paths,
)


def eligible_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Where a block may start: the token and the one after it are both trained on.

    loss_mask [S] bool, True = trained on; returns [S] bool, the last one always False.
    """
    mask = np.asarray(loss_mask).astype(bool, copy=False)
    eligible = np.zeros(mask.shape, dtype=bool)  # [S] bool
    eligible[:-1] = mask[:-1] & mask[1:]
    return eligible


def recorded_length(loss_mask: np.ndarray) -> int:
    """Positions of a sample that some drafter reads: its last eligible anchor + 1, 0 without one."""
    return recorded_range(loss_mask)[1]


def recorded_range(loss_mask: np.ndarray, window: int | None = None) -> tuple[int, int]:
    """The first token that some drafter reads and how many it reads from there: tokens first .. first + n - 1.

    The last one is the last eligible anchor. With `window` no drafter looks back over more than that many
    tokens, so those further before the first eligible anchor are left out; (0, 0) without an anchor.
    """
    anchors = np.flatnonzero(eligible_anchors(loss_mask))
    if not len(anchors):
        return 0, 0
    first = 0 if window is None else max(0, int(anchors[0]) - window)
    return first, int(anchors[-1]) + 1 - first


@dataclass(slots=True, eq=False)
class MadeSample:
    """A sample and what a token file says of it; made where there is time, since one process writes them all."""

    ids: np.ndarray  # [S] u32
    mask: np.ndarray  # [S] u8 of 0 and 1
    num_anchors: int
    num_recorded: int
    sha256: bytes  # see `content_sha256`
    crc32c: int  # see `tokens_crc`


def made_sample(ids: np.ndarray, mask: np.ndarray) -> MadeSample:
    """One sample of ids [S] u32 and mask [S] bool, True = trained on; S is at least 1."""
    anchors, bits = np.flatnonzero(eligible_anchors(mask)), mask.view(np.uint8)
    num_recorded = int(anchors[-1]) + 1 if len(anchors) else 0  # as `recorded_length`
    return MadeSample(ids, bits, len(anchors), num_recorded, content_sha256(ids, bits), tokens_crc(ids, bits))


class SampleWriter:
    """Streams samples into `tokens-00000.arrow` and so on; each file appears whole.

    One writer a folder. `close` publishes the last file and removes token files of an earlier,
    longer run; leaving a `with` block by an exception removes only the unfinished file.
    """

    def __init__(self, folder: Path, rows_per_file: int = 50_000, *, metadata: Mapping[str, str] | None = None) -> None:
        """`metadata` stands in the schema of every file (ASCII, a few KB: what the samples follow from)."""
        self.folder = folder
        self.rows_per_file = rows_per_file
        self.metadata = metadata
        self.num_samples = 0
        self.num_files = 0
        self.file: TokensFile | None = None
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("tokens-*.arrow.tmp.*"):
            remove(path)

    def add(
        self,
        token_ids: Sequence[int] | np.ndarray,
        loss_mask: Sequence[int] | np.ndarray,
        *,
        split: str,
        task: str,
        source: str,
        source_line: int,
        origin: str = "elsewhere",
    ) -> None:
        """Adds one sample: token_ids [S], loss_mask [S], True = trained on; S is at least 1.

        `origin` says who wrote the answers, in the words of whoever made the sample.
        """
        ids = np.asarray(token_ids)
        mask = np.asarray(loss_mask).astype(bool)  # [S] bool
        if ids.ndim != 1 or mask.shape != ids.shape or not len(ids):
            raise ValueError(f"token_ids {ids.shape} and loss_mask {mask.shape}: expected two equal lengths from 1")
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32:
            raise ValueError(f"token ids are {ids.dtype} in {ids.min()}..{ids.max()}, expected integers in 0..2^32-1")
        self.add_made(made_sample(ids.astype("<u4"), mask), (split, task, source, origin), source_line)

    def add_made(self, sample: MadeSample, texts: tuple[str, str, str, str], source_line: int) -> None:
        """Adds one sample as it was made, perhaps by another process; `texts` are its `TEXT_COLUMNS`."""
        if self.file is None:
            self.file = self.new_file(self.num_files)
        content = int.from_bytes(sample.sha256[:8], "little")
        self.file.add(sample.ids, sample.mask, texts, (source_line, sample.num_recorded, content, sample.crc32c))
        self.count(1)

    def add_run(self, run: SampleRun) -> None:
        """Adds samples that were made before; the files are those of adding them one by one."""
        done = 0
        while done < len(run):
            if self.file is None:
                self.file = self.new_file(self.num_files)
            taken = self.file.add_run(run, done, self.rows_per_file - self.file.num_rows)
            done += taken
            self.count(taken)

    def count(self, num_samples: int) -> None:
        self.num_samples += num_samples
        if self.file is not None and (self.file.num_rows == self.rows_per_file or self.file.is_full):
            self.finish_file()

    def new_file(self, number: int) -> TokensFile:
        return TokensFile(self.folder / tokens_name(number), self.metadata)

    def finish_file(self) -> None:
        if self.file is not None:
            self.file.finish()
            self.file = None
            self.num_files += 1

    def close(self) -> int:
        """Publishes what is left and returns the number of samples; an empty set is one empty file."""
        if self.file is None and self.num_files == 0:
            self.file = self.new_file(0)
        self.finish_file()
        for number, path in tokens_paths(self.folder).items():
            if number >= self.num_files:
                remove(path)
        return self.num_samples

    def abort(self) -> None:
        """Drops the unfinished file; finished ones stay."""
        if self.file is not None:
            self.file.abort()
            self.file = None

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class SampleTable:
    """The samples of a folder, memory-mapped: opening it touches no token, however many there are.

    Raises UserError where the folder holds no token files, one is missing in between, or one is damaged; with
    `lazily` a file is opened and checked when a sample of it is first asked for.
    """

    def __init__(self, folder: Path, *, lazily: bool = False) -> None:
        self.folder = Path(folder)
        found = tokens_paths(self.folder)
        self.paths, numbers = list(found.values()), list(found)
        if not numbers or numbers != list(range(len(numbers))):
            missing = next(n for n in range(len(numbers) + 1) if n not in numbers)
            raise UserError(
                f"{str(self.folder / tokens_name(missing))!r} does not exist",
                "a folder with tokens-00000.arrow and all that follow",
                "check the path; `dflash prepare` makes such a folder",
            )
        self.opened: dict[int, MappedTokens] = {}
        if not lazily:
            len(self)  # opens all of them

    def file(self, number: int) -> MappedTokens:
        if number not in self.opened:
            self.opened[number] = MappedTokens(self.paths[number])
        return self.opened[number]

    @cached_property
    def file_first_rows(self) -> np.ndarray:
        """Rows before each file [files + 1] i64."""
        return np.cumsum([0, *(len(self.file(number)) for number in range(len(self.paths)))], dtype=np.int64)

    @property
    def metadata(self) -> dict[str, str]:
        """What the first file's schema says of the samples, beside its checksum."""
        return self.file(0).metadata

    @property
    def batches(self) -> list[pa.RecordBatch]:
        return [batch for number in range(len(self.paths)) for batch in self.file(number).batches]

    def __len__(self) -> int:
        return int(self.file_first_rows[-1])

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [S] u32 (a read-only view of the file) and loss mask [S] bool of one sample, checked."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} samples in {str(self.folder)!r}")
        number = int(np.searchsorted(self.file_first_rows, row, side="right")) - 1
        return self.file(number).tokens(row - int(self.file_first_rows[number]), called=row)

    def tokens_at(self, file: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """As `tokens`, by number of the file and row inside it, as a plan names them."""
        return self.file(file).tokens(row)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The file [N] i32 and the row inside it [N] i32 of every sample, as a plan names them."""
        rows = np.arange(len(self))
        files = np.searchsorted(self.file_first_rows, rows, side="right") - 1
        return files.astype(np.int32), (rows - self.file_first_rows[files]).astype(np.int32)

    def column(self, name: str) -> np.ndarray:
        """One column [N] over all files; text as an object array whose few strings are shared."""
        if name in TEXT_COLUMNS:
            codes, names = self.codes(name)
            return np.array([*names, None], dtype=object)[codes]
        kind = TOKENS_SCHEMA.field(name).type.to_pandas_dtype()
        parts = [batch.column(name).to_numpy() for batch in self.batches]
        return np.concatenate(parts) if parts else np.empty(0, dtype=kind)

    def codes(self, name: str) -> tuple[np.ndarray, list[str]]:
        """A text column as codes [N] i32 into its distinct texts, in order of first appearance."""
        names: dict[str, int] = {}
        parts = [np.empty(0, dtype=np.int32)]
        for batch in self.batches:
            column = batch.column(name)
            own = [names.setdefault(text, len(names)) for text in column.dictionary.to_pylist()]
            parts.append(np.array(own, dtype=np.int32)[column.indices.to_numpy()])
        return np.concatenate(parts), list(names)

    def first_anchors(self) -> np.ndarray:
        """The first eligible anchor [N] i64 of every sample, -1 without one; reads all masks, unchecked."""
        parts = [np.empty(0, dtype=np.int64)]
        for batch in self.batches:
            masks = batch.column("loss_mask")
            offsets = masks.offsets.to_numpy().astype(np.int64)  # [rows + 1]
            mask = masks.values.to_numpy()  # u8, of all rows
            is_anchor = mask.astype(bool)
            is_anchor[:-1] &= is_anchor[1:]
            is_anchor[offsets[1:] - 1] = False  # the last token of a sample; the next one is another's
            anchors = np.append(np.flatnonzero(is_anchor), len(mask))
            found = anchors[np.searchsorted(anchors, offsets[:-1])]  # [rows]
            parts.append(np.where(found < offsets[1:], found - offsets[:-1], -1))
        return np.concatenate(parts)

    def trained_tokens(self) -> np.ndarray:
        """Tokens to train on [N] i64 of every sample; reads all masks, unchecked."""
        parts = [np.empty(0, dtype=np.int64)]
        for batch in self.batches:
            masks = batch.column("loss_mask")
            sums = np.concatenate([[0], np.cumsum(masks.values.to_numpy(), dtype=np.int64)])
            parts.append(np.diff(sums[masks.offsets.to_numpy()]))
        return np.concatenate(parts)

    def fingerprint(self) -> str:
        """sha256 of what the samples are: lengths, ids, masks and splits in row order.

        Independent of files and batches, of task, source and time: sha256 over the four digests of
        the concatenated lengths (i64), ids (u32), masks (u8) and splits (utf-8, each ended by NUL).
        """
        digests = [hashlib.sha256() for _ in range(4)]
        for batch in self.batches:
            digests[0].update(memoryview(batch.column("num_tokens").to_numpy().astype("<i8")))
            digests[1].update(memoryview(batch.column("token_ids").flatten().to_numpy().astype("<u4", copy=False)))
            digests[2].update(memoryview(batch.column("loss_mask").flatten().to_numpy()))
            splits = batch.column("split")
            texts = [f"{text}\0".encode() for text in splits.dictionary.to_pylist()]
            digests[3].update(b"".join(texts[code] for code in splits.indices.to_pylist()))
        return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
