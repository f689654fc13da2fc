"""One token file as a reader sees it: mapped, checked once but for its ids and masks, looked up by row."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from .. import UserError
from .arrow_file import CHECKSUM_KEY
from .tokens_file import TOKENS_SCHEMA, is_sound, tokens_crc


class BatchViews(NamedTuple):
    """Columns of one record batch as views of the file."""

    ids: np.ndarray  # u32, of all its samples
    ids_offsets: np.ndarray  # [rows + 1] i32
    mask: np.ndarray  # u8
    mask_offsets: np.ndarray
    crc32c: np.ndarray  # [rows] u32


class MappedTokens:
    """One token file, mapped and checked but for ids and masks, which are checked at each look-up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches, self.metadata = open_batches(path)
        self.first_rows = [0, *accumulate(batch.num_rows for batch in self.batches)]
        self.views: list[BatchViews | None] = [None] * len(self.batches)

    def __len__(self) -> int:
        return self.first_rows[-1]

    def tokens(self, row: int, *, called: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids [S] u32 (a view) and loss mask [S] bool of one row of the file, checked.

        `called` is the row's number in errors, where it is another.
        """
        if not 0 <= row < len(self):
            raise self.damaged(f"it holds {len(self)} samples, row {row} is asked for")
        number = bisect_right(self.first_rows, row) - 1
        views, inside = self.batch(number), row - self.first_rows[number]
        ids = list_item(views.ids, views.ids_offsets, inside)
        mask = list_item(views.mask, views.mask_offsets, inside)
        if ids is None or mask is None or len(ids) != len(mask) or tokens_crc(ids, mask) != views.crc32c[inside]:
            raise self.damaged(
                f"the tokens of sample row {row if called is None else called} do not match their checksum"
            )
        return ids, mask != 0

    def batch(self, number: int) -> BatchViews:
        views = self.views[number]
        if views is None:
            batch = self.batches[number]
            ids, mask = batch.column("token_ids"), batch.column("loss_mask")
            parts = (ids.values, ids.offsets, mask.values, mask.offsets, batch.column("crc32c"))
            views = self.views[number] = BatchViews(*(part.to_numpy() for part in parts))
        return views

    def damaged(self, reason: str) -> UserError:
        return UserError(
            f"{str(self.path)!r} is damaged: {reason}",
            "the bytes that were written",
            "make the samples again with `dflash prepare`, or copy the file again",
        )


def open_batches(path: Path) -> tuple[list[pa.RecordBatch], dict[str, str]]:
    """The record batches of a mapped token file, and its schema's metadata but the checksum; nothing is copied."""
    try:
        buffer = pa.memory_map(str(path)).read_buffer()
        if not is_sound(memoryview(buffer)):
            raise pa.ArrowInvalid(f"its {len(buffer)} bytes do not match their checksum")
        reader = pa.ipc.open_file(buffer)
        if reader.schema.remove_metadata() != TOKENS_SCHEMA:
            raise pa.ArrowInvalid(f"its columns are {', '.join(reader.schema.names)}")
        said = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
        said.pop(CHECKSUM_KEY, None)
        return [reader.get_batch(number) for number in range(reader.num_record_batches)], said
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{str(path)!r} is no whole token file: {error}".replace("\n", " "),
            f"an Arrow IPC file with the columns {', '.join(TOKENS_SCHEMA.names)}",
            "make the samples again with `dflash prepare`, or copy the file again",
        ) from error


def list_item(values: np.ndarray, offsets: np.ndarray, row: int) -> np.ndarray | None:
    """Row `row` of a list column as a view; None where its offsets are damaged."""
    first, last = int(offsets[row]), int(offsets[row + 1])
    return values[first:last] if 0 <= first <= last <= len(values) else None
