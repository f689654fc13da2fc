"""What the ranks of a run do together: meet, sum gradients, compare. No wrapper around the model.

Each rank calls the same methods in the same order, so that none waits for a call that never comes. On CUDA
gradients go over NCCL and everything else, which the host waits for, over gloo.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from .. import UserError
from ..watch import Channel, PeerLost, Stalled
from .clock import Moment
from .rank import Rank

CHUNK_NUMBERS = 16 * 2**20  # of a flat gradient summed in one call: 64 MiB
ASK_S = 0.05  # between two questions for the port of rank 0
PORT = "port"  # kind of the message in which rank 0 tells it, and in which the others ask for it


class Ranks:
    """This process among the ranks of its run. Alone, every method gives back what it was given, at no cost.

    Whatever waits for other ranks says so through the channel; PeerLost is raised where one of them is gone.
    """

    def __init__(self, rank: Rank, device: torch.device, channel: Channel) -> None:
        self.number, self.count, self.num_local = rank.number, rank.count, rank.num_local
        self.device, self.channel = device, channel
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and self.count > 1 else None
        self.sum_moments: tuple[Moment, Moment] | None = None

    @property
    def is_first(self) -> bool:
        """Rank 0 alone writes into RUN and speaks to the launcher."""
        return self.number == 0

    def gather(self, value: Any, what: str) -> list[Any]:
        """The values of all ranks, in their order; `what` says what they are."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with self.together(what):
            dist.all_gather_object(values, value)
        return values

    def meet(self, what: str) -> None:
        """Waits until every rank is here."""
        self.gather(None, what)

    def add_up(self, numbers: Sequence[float], what: str) -> list[float]:
        """The sums over all ranks of a few numbers; every rank gets the same ones."""
        if self.count == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        with self.together(what):
            dist.all_reduce(sums)
        return sums.tolist()

    def start_sum(self, flat: Tensor, values: Tensor) -> None:
        """Begins to sum `flat` (fp32) and `values` over all ranks, in place; on CUDA beside what is launched next."""
        if self.count == 1:
            return
        if self.stream is None:
            with self.together("the sum of the gradients"):
                sum_chunks(flat, values)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), self.named_loss("the sum of the gradients"):
            began = Moment(self.device)
            sum_chunks(flat, values)
            self.sum_moments = (began, Moment(self.device))

    def finish_sum(self) -> None:
        """What is launched from now on sees the sums; the host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def device_sum_s(self) -> float:
        """How long the last sum took on the device, once it is done, seconds; 0 on a CPU, where the host waits."""
        if self.sum_moments is None:
            return 0.0
        began, ended = self.sum_moments
        return began.seconds_to(ended)

    def require_equal(self, value: str, what: str) -> None:
        """Raises UserError, naming two ranks and their values, unless all ranks have one value."""
        values = self.gather(value, what)
        other = next((i for i, found in enumerate(values) if found != values[0]), None)
        if other is not None:
            raise UserError(
                f"{what}: rank 0 has {values[0]}, rank {other} has {values[other]}",
                "the same on every rank",
                "look at devices, packages and store of that rank, then give the same command again",
            )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around a call that the host waits in until every rank has come to it."""
        with self.channel.waiting(what), self.named_loss(what):
            yield

    @contextmanager
    def named_loss(self, what: str) -> Iterator[None]:
        """Makes PeerLost of the errors of torch.distributed, which are RuntimeErrors of many texts."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise PeerLost(f"rank {self.number} of {self.count} lost another rank in {what}: {reason}") from error

    def close(self) -> None:
        """Leaves the others, all of whom have come to this point."""
        if self.count > 1:
            self.meet("the end of the run")
            dist.destroy_process_group()


def sum_chunks(flat: Tensor, values: Tensor) -> None:
    """One call for each chunk: the first are on their way while the others are still to be started."""
    works = [dist.all_reduce(part, async_op=True) for part in (*flat.split(CHUNK_NUMBERS), values)]
    for work in works:
        assert work is not None
        work.wait()


def join(rank: Rank, device: torch.device, channel: Channel, stall_s: float) -> Ranks:
    """This process, of which `device` is the current one, as one of its ranks, once all of them are there.

    Ranks of one launcher meet on the loopback interface, at a port that the system chooses for rank 0; others at
    MASTER_ADDR and MASTER_PORT. NCCL's environment stays as it is.
    """
    if rank.count == 1:
        return Ranks(rank, device, channel)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=2 * stall_s + 60)  # the launcher sees a silence before
    ranks = Ranks(rank, device, channel)
    where: dict[str, Any] = {"init_method": "env://"}
    if not rank.has_address:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = {"store": local_store(rank, channel, stall_s, limit)}
    with ranks.together("the meeting of all ranks"):
        try:
            dist.init_process_group(backend, rank=rank.number, world_size=rank.count, timeout=limit, **where)
        except dist.DistNetworkError as error:
            if rank.number == 0 and "failed to listen" in str(error):
                raise cannot_listen(error) from error
            raise
    return ranks


def cannot_listen(error: Exception) -> UserError:
    """Nobody was lost: rank 0 has no place where the others could find it."""
    said = str(error).partition("\n")[0]
    return UserError(
        f"rank 0 cannot listen at MASTER_PORT = {os.environ.get('MASTER_PORT')}: {said}",
        "a free port on rank 0's machine, the same for every rank",
        "end what holds that port, or set another MASTER_PORT for every rank",
    )


def local_store(rank: Rank, channel: Channel, stall_s: float, limit: timedelta) -> TCPStore:
    """The store at which ranks of one machine find each other; rank 0 serves it and tells the launcher the port."""
    host = "127.0.0.1"
    if rank.number == 0:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, rank.count, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        channel.tell((PORT, {"port": port}))
        return store
    end = time.monotonic() + stall_s
    while (port := channel.ask((PORT, {}), stall_s)) is None:
        if time.monotonic() > end:
            raise Stalled(rank.name, "the port of rank 0", stall_s)
        time.sleep(ASK_S)
    assert isinstance(port, int)
    return TCPStore(host, port, rank.count, False, limit, wait_for_workers=False)
