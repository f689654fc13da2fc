"""The store as the check of a sweep looks at it: opened once, its rows packed once for all runs that share them."""

from pathlib import Path
from types import TracebackType
from typing import Any

from ...store.reader import StoreReader
from ..order import RowOrder
from ..run import StoreLook


class OneLook(StoreLook):
    """Remembers every answer until it is closed; the store does not change meanwhile."""

    def __init__(self) -> None:
        self.readers: dict[tuple[Path, bool], StoreReader] = {}
        self.counts: dict[Any, int] = {}

    def open(self, store: Path, partial: bool) -> StoreReader:
        """The same reader for every run; it is closed with this object."""
        key = (store, partial)
        if key not in self.readers:
            self.readers[key] = super().open(store, partial)
        return self.readers[key]

    def count_rows(self, order: RowOrder) -> int:
        """Rows depend on the samples, the tokens of a row, the seed and the shuffle; not on anchors and blocks."""
        key = (order.samples.tobytes(), order.shape.row_tokens, order.seed, order.shuffle_segments)
        if key not in self.counts:
            self.counts[key] = super().count_rows(order)
        return self.counts[key]

    def count_holding(self, reader: StoreReader, token: int) -> int:
        key = (id(reader), token)  # readers live as long as this object
        if key not in self.counts:
            self.counts[key] = super().count_holding(reader, token)
        return self.counts[key]

    def __enter__(self) -> "OneLook":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self.readers.values():
            reader.close()
