"""Which rows a run still has to train on, as the plan of a loader. A pure function of the run and where it stands."""

from pathlib import Path

from ..threads import loader_threads
from .checkpoint import LoopState
from .loader import LoaderPlan
from .order import Place
from .ranks import Ranks
from .run import Run
from .slot import RowSlot


def plan_rows(run: Run, state: LoopState, last_step: int, ranks: Ranks) -> LoaderPlan:
    """The rows from where `state` stands up to update `last_step`."""
    facts, config = run.facts, run.config
    slot = RowSlot(
        shape=facts.shape,
        num_taps=facts.spec.num_taps,
        hidden_size=facts.spec.hidden_size,
        codec_name=facts.codec_name,
        has_last=config.loss.needs_last,
    )
    return LoaderPlan(
        store_dir=Path(config.store).absolute(),
        segments=facts.segments,
        snapshot=facts.snapshot,
        taps=run.taps,
        slot=slot,
        seed=facts.seed,
        shuffle_segments=facts.shuffle_segments,
        start=Place(state.epoch, state.row),
        num_rows=max(0, last_step - state.step) * facts.rows_per_step,
        rows_per_step=facts.rows_per_step,
        rank=ranks.number,
        num_ranks=ranks.count,
        threads=config.loader_threads or loader_threads(ranks.num_local),
        uncached=config.uncached,
    )
