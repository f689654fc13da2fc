"""Every run of a sweep before the first one starts: its config is made and checked as `dflash train` would.

What is wrong is said of all runs at once. Here the sweep also settles what its runs read of the store. What the cards
hold is told by a process of its own, so that this one never takes memory of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import UserError
from ...settings import build, field_value
from ...watch import Channel, Job, run_all
from ..config import TrainConfig
from ..rank import choose_devices, named_devices
from ..sinks import require_packages
from .choices import OWN_FIELDS, Overrides
from .defaults import value_in
from .record import RunRecord, Sweep, numbers_text, shown, value_text

if TYPE_CHECKING:
    from ..facts import RunFacts
    from .one_look import OneLook

CARDS_S = 120.0  # for torch to start and to look at the cards
OTHER_BUDGET = "a step is another amount of training"
OTHER_SCHEDULE = "what it changes comes behind the rungs, or is judged halfway"
UNLIKE_AT_RUNGS = {
    "eval_samples": "their exams are of different answers",
    **dict.fromkeys(("steps", "epochs"), "a step lies elsewhere in their learning rates"),
    **dict.fromkeys(("rows.row_tokens", "rows.anchors", "rows.rows_per_step"), OTHER_BUDGET),
    **dict.fromkeys(("optim.schedule", "optim.decay_share", "optim.final_share"), OTHER_SCHEDULE),
}
"""Fields in which runs that are compared at rungs must agree, and what is wrong with the comparison else."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where runs train, one at a time; `memory_bytes` is None for a CPU."""

    name: str
    memory_bytes: int | None = None

    @property
    def type(self) -> str:
        return self.name.partition(":")[0]


def find_devices(devices: str) -> list[Device]:
    """The devices that a text means, with their memory; only where it may mean cards is torch asked."""
    if devices != "auto" and set(named_devices(devices)) == {"cpu"}:
        return [Device(name) for name in named_devices(devices)]
    found: list[Any] = []
    job = Job("the look at the cards", tell_devices, (devices,))
    run_all([job], stall_s=CARDS_S, on_message=lambda _name, message: found.append(message))
    return found[0]


def tell_devices(channel: Channel, devices: str) -> None:
    """Tells the list of Device that `devices` means on this machine."""
    import torch

    from ..device import card_bytes, pick_device

    names = choose_devices(devices, torch.cuda.device_count(), None)
    channel.tell([Device(name, card_bytes(pick_device(name))) for name in names])


def config_of(sweep: Sweep, run: RunRecord, device: str) -> TrainConfig:
    """The settings of a run on a device. Raises UserError for a field or a value that is none."""
    own = {"store": sweep.store, "out": str(sweep.folder / run.folder), "devices": device}
    return build(TrainConfig, {**sweep.base, **run.overrides, **own}, "")


def require_base(base: Overrides) -> None:
    """Raises UserError for fields of [train] that are the sweep's own."""
    wrong = [name for name in base if name in OWN_FIELDS]
    if wrong:
        raise UserError(
            f"[train] says {wrong[0]} = {base[wrong[0]]!r}",
            f"settings that all runs share; {wrong[0]} is said with {OWN_FIELDS[wrong[0]]}",
            f"drop {wrong[0]} from [train]",
        )


def require_comparable(sweep: Sweep) -> None:
    """Raises UserError for runs that rungs would compare though the same step does not mean the same for them."""
    if not sweep.rungs:
        return
    values = {name: {value_text(value_in(sweep, run, name)) for run in sweep.runs} for name in UNLIKE_AT_RUNGS}
    wrong = [name for name, found in values.items() if len(found) > 1]
    if wrong:
        raise UserError(
            f"the runs differ in {', '.join(f'{name} ({UNLIKE_AT_RUNGS[name]})' for name in wrong)}, and "
            f"halving.steps = {sweep.rungs} compares them before their end",
            "runs of which the same step is the same amount of training, with exams of the same answers",
            f"drop [sweep.halving], or give {', '.join(wrong)} one value in [train]",
        )


def settle_part(sweep: Sweep, look: "OneLook") -> None:
    """Notes, before the first run of all, what is committed in the store: every run reads that, whatever follows.

    Raises UserError for a store that is not complete, unless all runs are `partial`.
    """
    if sweep.part is None:
        from ..run import committed_segments

        is_partial = all(
            field_value(TrainConfig, "partial", value_in(sweep, run, "partial")) is True for run in sweep.runs
        )
        reader = look.open(Path(sweep.store), is_partial)
        sweep.segments = committed_segments(reader)
        sweep.snapshot = reader.snapshot_in(sweep.segments)


def require_all(sweep: Sweep, runs: Sequence[RunRecord], devices: Sequence[Device]) -> None:
    """Checks these runs and notes how many steps each has. Raises one UserError that names all that cannot be."""
    if not runs:
        return
    from .one_look import OneLook  # imports torch, which a sweep that is finished does without
    from .same_runs import run_key

    room = min((d.memory_bytes for d in devices if d.memory_bytes is not None), default=None)
    faults: dict[tuple[str, str, str], list[RunRecord]] = {}
    first_of: dict[str, RunRecord] = {}
    with OneLook() as look:
        settle_part(sweep, look)
        for run in runs:
            try:
                config, is_new = config_of(sweep, run, devices[0].name), run.steps is None
                facts = checked_facts(sweep, config, devices[0].type, room, look)
                first = first_of.setdefault(run_key(config, facts), run)
                if is_new:
                    require_other(run, first)
                run.steps = facts.steps
            except UserError as error:
                happened = error.happened.replace(run.folder, f"{Path(run.folder).parent}/...")
                faults.setdefault((happened, error.expected, error.advice), []).append(run)
    if faults:
        raise refusal(faults, len(runs))


def require_other(run: RunRecord, first: RunRecord) -> None:
    """Raises UserError for a run that is the same as an earlier one, `first`, though it does not set the same."""
    if run is not first:
        raise UserError(
            f"it is the same run as run {first.number} ({shown(first.overrides)}), with every default filled in",
            "runs that differ from each other, not in what they set alone",
            "drop one of the two, or the value that is the default (of draws: give another seed)",
        )


def checked_facts(
    sweep: Sweep, config: TrainConfig, device_type: str, card_bytes: int | None, look: "OneLook"
) -> "RunFacts":
    """The facts of a run that can be trained; raises UserError, as `dflash train` would, for another."""
    from ..run import check_run

    require_packages(config.sinks)
    facts = check_run(config, lambda: device_type, card_bytes, look=look, part=sweep.part).facts
    if facts.num_held_out == 0:
        raise UserError(
            f"the store {config.store!r} holds no held-out sample",
            "held-out samples, on which runs are compared",
            "prepare with a --held-out share, and extract again",
        )
    if sweep.rungs and sweep.rungs[-1] >= facts.steps:
        raise UserError(
            f"halving.steps = {sweep.rungs}, and the run has {facts.steps} steps",
            "rungs before the last step of every run",
            "drop the last rung, or train longer",
        )
    return facts


def refusal(faults: dict[tuple[str, str, str], list[RunRecord]], num_runs: int) -> UserError:
    """One error for all runs that cannot be trained; what several runs share is said once."""
    wrong = [run for runs in faults.values() for run in runs]
    whole = f"{len(wrong)} of {num_runs} runs cannot be trained"
    if len(faults) == 1:
        ((happened, expected, advice),) = faults
        return UserError(f"{whole} ({named(wrong)}): {happened}", expected, advice)
    parts = [f"{named(runs)}: {happened} (expected: {expected})" for (happened, expected, _), runs in faults.items()]
    advices = " | ".join(dict.fromkeys(advice for _, _, advice in faults))
    return UserError(f"{whole}: {'; '.join(parts)}", "runs that can all be trained; none was started", advices)


def named(runs: Sequence[RunRecord]) -> str:
    """Runs by number, one alone with what it sets."""
    return f"run {runs[0].number}, {shown(runs[0].overrides)}" if len(runs) == 1 else f"runs {numbers_text(runs)}"
