"""Reads several slices at once on the threads of one process, with the outcome of reading them one after another."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from .slices import Piece, SegmentDamage, Slice

CHAINS = 4  # for each thread: enough that none waits long for the last one
Error = SegmentDamage | OSError
Step = tuple[int, Slice, Piece]  # number of the slice, and what to read of it


class SlicePool:
    """Up to `threads` threads, started when first needed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.pool: ThreadPoolExecutor | None = None

    def read(self, slices: Sequence[Slice]) -> list[Error | None]:
        """Reads slices in order up to the first that fails; the error of each, None for those before it and after it.

        When it returns or raises nothing is being read any more.
        """
        steps = [(number, wanted, piece) for number, wanted in enumerate(slices) for piece in wanted.pieces]
        if self.threads == 1 or len(steps) == 1:
            found = [run(steps)]
        else:
            found = self.run_together(steps)
        errors: list[Error | None] = [None] * len(slices)
        for failure in found:
            if failure is not None:
                errors[failure[0]] = failure[1]
                break
        return errors

    def run_together(self, steps: list[Step]) -> list[tuple[int, Error] | None]:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="store-reader")
        size = -(-len(steps) // (CHAINS * self.threads))
        futures = [self.pool.submit(run, steps[first : first + size]) for first in range(0, len(steps), size)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None


def run(steps: Sequence[Step]) -> tuple[int, Error] | None:
    """Reads pieces one after another; the first error ends it and is given back with its slice's number."""
    for number, wanted, piece in steps:
        try:
            wanted.read_piece(piece)
        except (SegmentDamage, OSError) as error:
            return number, error
    return None
