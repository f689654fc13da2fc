"""The benchmark of a run in small: what it compares are the same rows, and its table names every number."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module", autouse=True)
def parts_in_reach() -> Iterator[None]:
    """The benchmark is a script: what it imports lies beside it."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths and lengths that say only whether the benchmark runs."""
    from run_parts import loading
    from store_parts import made

    monkeypatch.setattr(made, "HIDDEN", 64)
    monkeypatch.setattr(made, "TAPS", 2)
    monkeypatch.setattr(made, "LONGEST", 512)
    for name, value in {"MEDIAN": 150, "SHORTEST": 20, "ROW_TOKENS": 512}.items():
        monkeypatch.setattr(loading, name, value)


def test_bare_reads_leave_in_the_slots_what_the_loader_leaves_there(tmp_path: Path, monkeypatch) -> None:
    small(monkeypatch)
    from dflash_offline.store.reader import StoreReader
    from run_parts.loading import SLOTS, BareRows, loader_of, make_states, order_of
    from store_parts.made import Noise

    noise = Noise()
    with StoreReader(make_states(tmp_path, noise, 3e-3)) as reader:
        order = order_of(reader)
        with loader_of(reader, noise, order) as loader:
            bare = BareRows(loader, reader, order)
            expected = []
            for _ in range(SLOTS):
                with loader.row() as row:
                    expected.append(row.arrays.taps.copy())
        for taps in bare.taps:
            taps[:] = 0
        for number, row in enumerate(order.rows(0)[:SLOTS]):
            for fd, buffers, offset in bare.calls(bare.taps[number], row):
                os.preadv(fd, buffers, offset)
        bare.close()
    for number, taps in enumerate(expected):
        np.testing.assert_array_equal(bare.taps[number], taps)


def test_the_part_gives_every_row_with_its_bar(tmp_path: Path, monkeypatch) -> None:
    small(monkeypatch)
    from run_parts.loading import loading_rows
    from run_parts.planning import planning_rows

    rows = {row.name: row for row in loading_rows(tmp_path, 5e-3, 1) + planning_rows(1, 20_000)}
    assert {"loader_vs_preadv", "loader_vs_dataloader", "packing_fill", "plan_epoch_s"} <= set(rows)
    bars = {name: (row.least, row.most) for name, row in rows.items() if row.bar}
    assert bars == {
        "loader_vs_preadv": (0.7, None),
        "loader_vs_dataloader": (3, None),
        "packing_fill": (0.97, None),
        "plan_epoch_s": (None, 10),
    }
    assert all(row.value > 0 for row in rows.values())
    assert rows["packed_samples"].value == 20_000
