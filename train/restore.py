"""Where the weights of a start come from: the newest checkpoint of the run, or a drafter's folder.

Knows masters, moments and checkpoints; it does not know how a step is made.
"""

from pathlib import Path

import torch

from . import checkpoint
from .checkpoint import LoopState
from .checkpoint_check import require_fit
from .drafter import Drafter
from .facts import read_facts
from .optim import MasterOptimizer
from .outcome import require_exams_before
from .ranks import Ranks
from .warm_start import WarmStart, load_start


def restore(run_dir: Path, drafter: Drafter, optimizer: MasterOptimizer, ranks: Ranks) -> LoopState | None:
    """Sets weights and moments to those of the newest checkpoint that rank 0 sees; None where there is none.

    Raises UserError, before anything is set, for a checkpoint that is damaged or not of this run, where metrics.jsonl
    has lost the exams before it, and where the ranks have not read the same bits.
    """
    steps = checkpoint.list_steps(run_dir) if ranks.is_first else []
    newest = ranks.gather(steps[-1:], "the newest checkpoint")[0]
    if not newest:
        return None
    loaded, facts = checkpoint.load(run_dir, newest[0]), read_facts(run_dir)
    with checkpoint.named_damage(run_dir, newest[0]):
        require_fit(loaded.state, loaded.weights, loaded.optimizer, facts=facts, drafter=drafter, optimizer=optimizer)
    if ranks.is_first:
        require_exams_before(run_dir, loaded.state.step, loaded.state.exam_step)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(loaded.weights[name])
    optimizer.load_state_dict({**loaded.optimizer, "masters": loaded.weights})
    ranks.require_equal(optimizer.checksum(), f"weights and moments as read, step {newest[0]}")
    return loaded.state


@torch.no_grad()
def start_from(start: WarmStart, optimizer: MasterOptimizer) -> None:
    """Sets masters, and from them the weights, to those of the drafter that the run starts from."""
    weights = load_start(start)
    for name, master in zip(optimizer.names, optimizer.masters):
        master.copy_(weights[name])
    optimizer.round_masters()
