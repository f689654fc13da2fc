"""Work on static buffers as one CUDA graph: captured once, then replayed in place of its many launches.

Knows addresses only. What is captured must read and write memory that stays where it is, and wait for nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import UserError

WARM_UP_ROWS = 2  # rows run launch by launch first: they compile, load and choose every kernel
Pool = Any  # of memory, as torch.cuda.graph_pool_handle names it
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Replay:
    """`work`, captured when this is made and not run by it; each call runs it once.

    `buffers` are the tensors that callers fill for it and read from it. What it allocates lives in `pool`, which is
    kept for the next call; graphs that run one after another on one stream, none leaving anything there for a later
    one, may share it.
    """

    def __init__(self, work: Callable[[], None], buffers: Sequence[Tensor], pool: Pool) -> None:
        self.work = work  # what it holds must outlive the graph
        self.places = places_of(buffers)
        self.num_replays = 0
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            work()

    def __call__(self, buffers: Sequence[Tensor]) -> None:
        """Runs the work. Raises RuntimeError where a buffer is not the one that was captured."""
        require_same_places(self.places, places_of(buffers))
        self.graph.replay()
        self.num_replays += 1


def choose_graph(setting: str, device: torch.device, *, has_room: bool = True) -> tuple[bool, str | None]:
    """Whether rows run as one graph, and a line that says so where there is a choice (CUDA).

    `has_room` is False where its memory would not fit beside an exam's.
    Raises UserError where a graph is asked for on a device that has none.
    """
    if device.type != "cuda":
        if setting == "on":
            raise UserError(f"cuda_graph = 'on' on device {device}", "a CUDA device", "set cuda_graph = auto or off")
        return False, None
    if setting == "off":
        return False, "rows run launch by launch: cuda_graph = off"
    if not has_room:
        return False, "rows run launch by launch: a CUDA graph's memory does not fit beside an exam's"
    return True, f"a row is one CUDA graph after {WARM_UP_ROWS} rows of launches"


def places_of(buffers: Sequence[Tensor]) -> tuple[Place, ...]:
    """Address, shape, strides and number format of each buffer."""
    return tuple((buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype) for buffer in buffers)


def require_same_places(captured: Sequence[Place], given: Sequence[Place]) -> None:
    """Raises RuntimeError, naming the first buffer that differs: a replay would go on reading the old memory."""
    if captured == given:
        return
    pairs = zip(captured, given)
    number = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(captured), len(given)))
    count = f"captured on {len(captured)} buffers; of the {len(given)} given now"
    raise RuntimeError(f"a CUDA graph was {count}, number {number} is another")
