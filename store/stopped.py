"""What is done and said where the filling of a store breaks off, by `extract` or by `recode`.

Knows the store, not who fills it: what was committed is safe, and the same command continues.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from .. import UserError
from ..progress import say
from .index import committed_segments


@contextmanager
def told_when_stopped(
    store_dir: Path, plan: pa.Table, num_segments: int, clear_away: Callable[[], object]
) -> Iterator[None]:
    """Where its body ends by an error, removes what was left half written, by `clear_away`, and says what is safe."""
    try:
        yield
    except BaseException:
        with suppress(OSError, UserError):  # a disk that fails at this too; the next start removes them
            clear_away()
        say(what_is_safe(store_dir, plan, num_segments))
        raise


def what_is_safe(store_dir: Path, plan: pa.Table, num_segments: int) -> str:
    """What a broken run leaves, as the disk has it: a worker may have died before it could tell."""
    try:
        done = committed_segments(store_dir)
    except (OSError, UserError) as error:  # it hides no other error: why the run stopped is told after it
        return f"stopped: what is committed cannot be told now: {error}".splitlines()[0]
    is_done = np.isin(plan.column("segment").to_numpy(), np.fromiter(done, dtype=np.int64))
    return (
        f"stopped: {int(is_done.sum()):,} of {plan.num_rows:,} samples, in {len(done)} of {num_segments} segments, "
        "are committed and safe; the same command continues from there"
    )
