"""Checks the token files of a store: what they say of samples against the plan, ids and masks against their crc."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from .. import UserError
from .index import columns, text_column
from .links import require_own_tokens
from .manifest import Manifest
from .reader import open_tokens
from .samples import SampleTable, recorded_range
from .segment_check import Columns, Fault
from .tokens_file import TEXT_COLUMNS

AT_ONCE = 20_000  # samples that one thread checks before it takes the next job
FROM_DATA = "delete it and run the same extract again, which links it from DATA; is it damaged there too, prepare first"


class TokensCheck:
    """The tokens of every planned sample. Raises UserError where a file is missing or damaged as a whole."""

    def __init__(self, store_dir: Path, manifest: Manifest, plan: pa.Table) -> None:
        self.store_dir = store_dir
        self.manifest = manifest
        self.plan_table = plan
        self.plan = columns(plan)
        self.table = open_tokens(store_dir, self.plan)

    def column_faults(self) -> list[Fault]:
        """Token files that are not those of the plan, by their checksums and by what they say of the samples."""
        faults: list[Fault] = []
        try:
            require_own_tokens(self.store_dir, self.plan_table)
        except UserError as error:
            faults.append(Fault(error.happened, advice=FROM_DATA))
        files = self.plan["tokens_file"]
        rows = self.table.file_first_rows[files] + self.plan["tokens_row"]  # [samples]
        for name in ("source_line", *TEXT_COLUMNS):
            planned = self.plan[name] if name in self.plan else spelled(self.plan_table, name)
            wrong = np.flatnonzero(self.table.column(name)[rows] != planned)
            for file in np.unique(files[wrong]).tolist():
                sample_id = int(self.plan["sample_id"][wrong[files[wrong] == file][0]])
                text = f"{self.table.paths[file]}: {name} differs from the plan, first for sample {sample_id}"
                faults.append(Fault(text, advice=FROM_DATA))
        return faults

    def jobs(self) -> list[Callable[[], list[Fault]]]:
        """The long part, for threads: ids and masks, and the fingerprint of all samples where the manifest has it."""
        starts = range(0, len(self.plan["n"]), AT_ONCE)
        window = self.manifest.window
        jobs = [lambda start=start: token_faults(self.table, self.plan, window, start) for start in starts]
        expected = self.manifest.data.get("fingerprint")
        return jobs if expected is None else [*jobs, lambda: fingerprint_faults(self.table, expected)]


def spelled(table: pa.Table, name: str) -> np.ndarray:
    """A text column as an object array [samples]."""
    codes, texts = text_column(table, name)
    return np.array([*texts, None], dtype=object)[codes]


def token_faults(table: SampleTable, plan: Columns, window: int | None, start: int) -> list[Fault]:
    """Ids and masks of some samples, against their checksums, and what is recorded of them against mask and window."""
    faults: list[Fault] = []
    here = slice(start, start + AT_ONCE)
    places = (plan[name][here].tolist() for name in ("sample_id", "first", "n", "tokens_file", "tokens_row"))
    for sample_id, first, n, file, row in zip(*places):
        try:
            ids, mask = table.tokens_at(file, row)
        except UserError as error:
            faults.append(Fault(f"{error.happened}: sample {sample_id}", advice=FROM_DATA))
            continue
        if len(ids) <= first + n:
            text = (
                f"{table.paths[file]}: sample {sample_id} has {len(ids)} tokens, too few for {n} recorded positions"
                + (f" from token {first} on" if first else "")
            )
            faults.append(Fault(text, advice=FROM_DATA))
        elif recorded_range(mask, window) != (first, n):
            wanted = f"{tokens_text(*recorded_range(mask, window))} by its mask and window {window}"
            text = f"{table.paths[file]}: sample {sample_id} has {tokens_text(first, n)} recorded, not {wanted}"
            faults.append(Fault(text, advice=FROM_DATA))
    return faults


def tokens_text(first: int, n: int) -> str:
    return f"tokens {first} to {first + n - 1}" if n else "no token"


def fingerprint_faults(table: SampleTable, expected: str) -> list[Fault]:
    """The samples of all token files are those that the manifest names."""
    found = table.fingerprint()
    if found == expected:
        return []
    text = f"{table.folder}: the samples have fingerprint {found[:16]}, the manifest names {expected[:16]}"
    return [Fault(text, advice=FROM_DATA)]
