"""A trainer process before and after its loop: it meets the other ranks, checks the run and takes its folder.

Knows in which order that must happen; nothing of how a run is trained.
"""

import errno
import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import torch

from .. import UserError
from ..store.files import NO_SPACE, FolderLock, storage_error
from ..threads import cpu_threads
from ..watch import Channel
from . import checkpoint
from .config import TrainConfig
from .device import card_bytes, device_name, pick_device
from .environment import plan_facts, write_environment
from .facts import KERNELS_NAME, StorePart
from .guards import out_of_memory
from .loop import Trainer
from .memory_choice import memory_table
from .outcome import REPORT_NAME
from .rank import Rank, ranks_here
from .ranks import Ranks, join
from .run import Run, check_run, make_folder, require_unchanged, write_run

DISK_FAILED = (*NO_SPACE, errno.EROFS, errno.EIO, errno.EFBIG)
LOCK_WAIT_S = 10.0  # a killed trainer needs a moment to let go of its memory and of RUN


def run_trainer(channel: Channel, config: TrainConfig, rank: Rank | None = None, part: StorePart | None = None) -> None:
    """The trainer process: starts, resumes or finds finished the run that `config` names.

    Without a `rank` it is the only one, on the first device that `config` means. A run of a sweep reads its `part`.
    """
    if rank is None:
        rank = ranks_here(config.devices, torch.cuda.device_count(), 1, {})[0]
    device = pick_device(rank.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where CUDA graphs and Triton kernels go, which ask no tensor
    ranks = join(rank, device, channel, config.stall_s)
    card = min(ranks.gather(card_bytes(device), "the memory of every card"), key=lambda size: size or 0)
    run = check_run(config, lambda: device.type, card, ranks.count, part=part)
    ranks.require_equal(run_digest(run), "the run as each rank would train it")
    torch.set_num_threads(config.cpu_threads or max(1, cpu_threads(run.facts.spec.hidden_size) // rank.num_local))
    with ExitStack() as held:
        is_finished = take_folder(run, held) if ranks.is_first else False
        if not ranks.gather(is_finished, "rank 0 to take the folder of the run")[0]:
            if ranks.is_first:
                note_environment(run, device, ranks.count)
            train_run(run, device, ranks)
        elif ranks.is_first:
            channel.tell(("finished", {}))
        ranks.close()


def run_digest(run: Run) -> str:
    """What all ranks must agree on before anything is written."""
    facts = run.facts.identity() | {"chunk_blocks": run.facts.chunk_blocks, "is_new": run.is_new}
    facts |= {"checkpointing": run.facts.is_checkpointed}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def take_folder(run: Run, held: ExitStack) -> bool:
    """Locks RUN until `held` ends and writes what it trains there; True where it is finished, and stays as it is."""
    make_folder(run.run_dir)
    held.enter_context(FolderLock(run.run_dir, wait_s=LOCK_WAIT_S))
    require_unchanged(run)
    if (run.run_dir / REPORT_NAME).exists():
        require_last_checkpoint(run)
        return True
    checkpoint.remove_temporaries(run.run_dir)
    write_run(run)
    return False


def note_environment(run: Run, device: torch.device, num_ranks: int) -> None:
    """Says in RUN on what it runs from here on."""
    write_environment(
        run.run_dir,
        device=device_name(device),
        num_ranks=num_ranks,
        threads=torch.get_num_threads(),
        memory_plan=plan_facts(run.choice),
    )


def train_run(run: Run, device: torch.device, ranks: Ranks) -> None:
    """Trains; a card that runs full is explained with the plan of its memory, a disk without room for kernels too."""
    try:
        Trainer(run, device, ranks.channel, ranks).train()
    except torch.OutOfMemoryError as error:
        if run.choice is not None:
            ranks.channel.tell(("notes", {"notes": [memory_table(run.choice)]}))
        raise out_of_memory(str(error), run.choice) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # a CPU's, for which torch has no class
            raise out_of_memory(str(error), run.choice) from error
        disk = getattr(error, "inner_exception", None)  # of torch's compiler, which names no path
        if not isinstance(disk, OSError) or disk.errno not in DISK_FAILED:
            raise
        safe = checkpoint.what_is_safe(run.run_dir)
        raise storage_error(disk, Path(disk.filename or run.run_dir / KERNELS_NAME), safe=safe) from error


def require_last_checkpoint(run: Run) -> None:
    """Raises UserError where a run says that it is finished but has lost what it trained."""
    steps = checkpoint.list_steps(run.run_dir)
    if run.facts.steps not in steps:
        there = f"steps {', '.join(map(str, steps))}" if steps else "none"
        raise UserError(
            f"{str(run.run_dir)!r} has {REPORT_NAME}, but its last checkpoint is gone (step {run.facts.steps})",
            f"the checkpoints that it was finished with; there are: {there}",
            f"bring them back, or remove {str(run.run_dir / REPORT_NAME)!r} to train the missing steps again",
        )
