"""What the children of test_ranks.py run; a module of its own, because children import it."""

import os
import signal
import time

import torch
from dflash_offline import UserError
from dflash_offline.train import ranks as ranks_module
from dflash_offline.train.rank import Rank
from dflash_offline.train.ranks import Ranks, join
from dflash_offline.watch import Channel

CPU = torch.device("cpu")


def joined(channel: Channel, rank: Rank, stall_s: float = 300.0) -> Ranks:
    torch.set_num_threads(1)
    return join(rank, CPU, channel, stall_s)


def sum_up(channel: Channel, rank: Rank) -> None:
    """Tells what each method gave back."""
    ranks_module.CHUNK_NUMBERS = 7  # three chunks
    ranks = joined(channel, rank)
    flat = torch.arange(20, dtype=torch.float32) * (rank.number + 1)
    values = torch.tensor([1.0, 10.0], dtype=torch.float64) + rank.number
    ranks.start_sum(flat, values)
    ranks.finish_sum()
    found = flat.tolist(), values.tolist(), ranks.add_up([1.0, rank.number], "numbers"), ranks.gather(rank.name, "name")
    ranks.close()
    channel.tell(("found", {rank.number: found}))


def disagree(channel: Channel, rank: Rank) -> None:
    ranks = joined(channel, rank)
    try:
        ranks.require_equal("aa" if rank.number == 0 else "bb", "weights after step 3")
    finally:
        ranks.meet("the end")


def refuse_one(channel: Channel, rank: Rank) -> None:
    """Rank 1 cannot go on; the others learn it from their sockets."""
    ranks = joined(channel, rank)
    if rank.number == 1:
        raise UserError("the disk of rank 1 is full", "room", "make some")
    ranks.meet("rank 1")


def lose_one(channel: Channel, rank: Rank) -> None:
    ranks = joined(channel, rank)
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.meet("rank 1")


def hang_apart(channel: Channel, rank: Rank) -> None:
    """Rank 1 never comes to where the others wait."""
    ranks = joined(channel, rank)
    channel.tell(("pid", {rank.number: os.getpid()}))
    if rank.number == 1:
        sleep_for_ever()
    ranks.meet("rank 1")


def sleep_for_ever() -> None:
    while True:
        time.sleep(1.0)
