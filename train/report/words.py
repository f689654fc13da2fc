"""A run in words and short tables: the one owner of what the page and `dflash inspect` say of it. No torch."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import UserError
from ...store.size import human_bytes
from ..export.formats import ZLAB, config_of
from ..export.serving import engine_name, serving_commands, serving_notes
from ..facts import CONFIG_NAME
from ..kinds import describe
from ..outcome import GREEDY, export_command
from ..row_memory import num_weights
from ..value_rules import is_finite
from .of_sweep import out_option
from .run_folder import FINISHED, RunFolder, Setting, settings_of
from .scale import short
from .series import EVALUATIONS, slot_means

EXPORT_FOLDER = "./export"
NOTHING = "nothing to measure"
NOT_EXACT = "agreement with text, not decoding"


@dataclass(frozen=True, slots=True)
class Number:
    """One of the numbers that a run is judged by."""

    name: str
    value: str
    meaning: str


def overview(run: RunFolder) -> dict[str, str]:
    """What was trained on what, and how far it is."""
    facts, spec = run.facts, run.facts.spec
    rows = f"{facts.row_tokens} tokens, {facts.anchors} anchors; {facts.rows_per_step} rows a step"
    return {
        "run": str(run.run_dir),
        "target": f"{facts.target['name']}, weights {facts.target['weights_sha256'][:12]}",
        "store": f"{facts.store_path}, plan {facts.store['plan_sha256'][:16]}",
        "drafter": f"{spec.num_layers} layers, hidden {spec.hidden_size}, taps {list(spec.tap_layers)}, "
        f"{num_weights(spec):,} parameters",
        "attention": describe(spec.attention),
        "started": f"from {facts.init['path']}" if facts.init is not None else "from random weights",
        "block": f"{spec.block_size} tokens, mask token {spec.mask_token_id}; {spec.slot_meaning}",
        "rows": f"{rows}, {facts.rows_per_epoch} rows an epoch",
        "samples": f"{facts.num_train:,} to train on, {facts.num_held_out:,} held out",
        "steps": f"{run.metrics.last_step} of {facts.steps} done, seed {facts.seed}, {facts.dtype}",
        "checkpoints": ", ".join(run.checkpoints) or "none yet",
    }


def key_numbers(run: RunFolder) -> list[Number]:
    """The few numbers at the top; what was not measured is left out."""
    metrics, exam, best, found = run.metrics, run.last_exam(), run.best_exam(), []
    if exam is not None and is_finite(length := exam.get("acceptance_length")):
        told = f"acceptance length, walk over {exam.get('num_prompts', '?')} held-out answers at step {exam['step']:,}"
        if exam.get("origin") != GREEDY:
            told += f"; origin {exam.get('origin') or 'unknown'}: {NOT_EXACT}"
        found.append(Number("acceptance", f"{length:.3f}", told))
    if best is not None and exam is not None and best["step"] != exam["step"]:
        found.append(Number("best", f"{best['acceptance_length']:.3f}", f"the best exam, at step {best['step']:,}"))
    for name, evaluation in evaluations(run):
        if is_finite(length := evaluation.get("acceptance_length")):
            count, step = evaluation.get("num_prompts", "?"), evaluation.get("step", "?")
            told = f"acceptance length, {name}, {count} prompts, step {step}"
            found.append(Number(name, f"{length:.3f}", told))
    if loss := metrics.curves["loss"].values:
        found.append(Number("loss", short(loss[-1]), f"training loss at step {metrics.curves['loss'].steps[-1]:,}"))
    if (rate := metrics.rate_tok_s()) is not None:
        found.append(Number("throughput", f"{rate:,.0f} tok/s", "tokens of samples over the time of all updates"))
    if (share := metrics.wait_share()) is not None:
        found.append(
            Number("data wait", f"{100 * share:.1f} %", "of the updates' time the device had no row to compute on")
        )
    if (peak := metrics.peak_bytes()) is not None:
        found.append(Number("memory", human_bytes(peak), f"at its peak, {memory_meaning(run)}"))
    return found


def memory_meaning(run: RunFolder) -> str:
    """What the measured memory is."""
    if run.facts.device_type == "cuda":
        return "allocated by torch on rank 0's device"
    return "resident memory of rank 0's process"


def evaluations(run: RunFolder) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, result) of the evaluations in RUN."""
    return [(name, run.evaluations[file]) for file, name, _ in EVALUATIONS if file in run.evaluations]


EVALUATION_HEAD = ("exam", "step", "prompts", "acceptance length", "mean over cycles", "lossless", "speed-up", "device")


def evaluation_rows(run: RunFolder) -> list[tuple[str, ...]]:
    """One row of texts for each evaluation, as EVALUATION_HEAD names them; intervals where they are known."""
    rows = []
    for name, found in evaluations(run):
        equal = found.get("num_equal")
        speed = found.get("speed_up")
        rows.append(
            (
                name,
                str(found.get("step", "?")),
                str(found.get("num_prompts", "?")),
                with_interval(found, "acceptance_length"),
                with_interval(found, "acceptance_length_cycles"),
                "-" if equal is None else f"{equal}/{found.get('num_prompts')}",
                "-" if not is_finite(speed) else f"{speed:.2f}",
                str(found.get("device", "?")),
            )
        )
    return rows


def with_interval(found: Mapping[str, Any], name: str) -> str:
    """A number with its 95 % interval, where there is one."""
    value, interval = found.get(name), (found.get("intervals") or {}).get(name)
    if not is_finite(value):
        return NOTHING
    return f"{value:.3f}{interval_text(interval)}"


def interval_text(interval: Any) -> str:
    """The interval in brackets, behind a number; empty where there is none."""
    is_known = isinstance(interval, (list, tuple)) and len(interval) == 2 and all(map(is_finite, interval))
    return f" [{interval[0]:.3f}, {interval[1]:.3f}]" if is_known else ""


SLOT_HEAD = ("slot", "right, train", "right, held out", "up to it, train", "up to it, held out")


def slot_rows(run: RunFolder) -> list[tuple[str, ...]]:
    """Percent for each slot, of the newest updates and the last exam; empty without any."""
    recent, exams = list(run.metrics.recent), run.metrics.exams[-1:]
    parts = [
        (lines, f"{held}{number}_slot_")
        for number in ("accuracy", "survival")
        for lines, held in ((recent, ""), (exams, "held_out_"))
    ]
    columns = [slot_means(lines, prefix) for lines, prefix in parts]
    rows = range(max(map(len, columns)))
    return [(str(slot + 1), *(percent(c[slot] if slot < len(c) else None) for c in columns)) for slot in rows]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def environment(run: RunFolder) -> dict[str, str]:
    """On what the run ran; of an older run, only what else tells it."""
    known, told = run.environment, {}
    if device := known.get("device"):
        told["device"] = f"{device}, {known.get('num_ranks', 1)} rank(s), {known.get('threads', '?')} thread(s)"
    else:
        told["device"] = f"{run.facts.device_type}; more was not recorded"
    versions = known.get("versions")
    versions = versions if isinstance(versions, dict) else {"dflash-offline": run.package_version}
    told["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    told["number format"] = run.facts.dtype
    for name, evaluation in evaluations(run):
        device, torch, threads = (evaluation.get(key, "?") for key in ("device", "torch", "threads"))
        told[f"evaluated, {name}"] = f"{device}, torch {torch}, {threads} thread(s)"
    return told


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A part of the plan, or a sum, in bytes."""

    name: str
    size_bytes: int
    grows_with: str = ""
    kind: str = "part"  # part, sum, card or measured


def memory_rows(run: RunFolder) -> list[MemoryRow]:
    """The plan part by part, its peak, and what was measured; only the latter where nothing was planned."""
    plan, rows = run.environment.get("memory_plan"), []
    if isinstance(plan, dict):
        parts = plan.get("parts", [])
        rows += [MemoryRow(p["name"], p["size_bytes"], p["grows_with"]) for p in parts if p["size_bytes"]]
        rows.append(MemoryRow(f"predicted peak ({plan['largest']})", plan["peak_bytes"], kind="sum"))
        rows.append(MemoryRow("the card", plan["card_bytes"], kind="card"))
    if (peak := run.metrics.peak_bytes()) is not None:
        rows.append(MemoryRow("measured peak", peak, memory_meaning(run), kind="measured"))
    return rows


def memory_note(run: RunFolder) -> str:
    """How far off the plan was, or why there is none."""
    plan, peak = run.environment.get("memory_plan"), run.metrics.peak_bytes()
    if not isinstance(plan, dict):
        return (
            "Nothing is planned on a CPU."
            if run.facts.device_type == "cpu"
            else "The plan of this run was not recorded."
        )
    if peak is None:
        return "Nothing was measured yet."
    return f"The measured peak is {100 * peak / plan['peak_bytes'] - 100:+.1f} % off the predicted one."


def changed_settings(run: RunFolder) -> list[Setting]:
    """Settings that are not at their default."""
    return [] if run.config is None else [setting for setting in settings_of(run.config) if setting.is_changed]


def value_text(value: Any) -> str:
    """A setting's value as one types it after `--set`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def commands(run: RunFolder) -> list[str]:
    """What is typed next: the rest of the run, the exams, the export."""
    own = shlex.quote(str(run.run_dir))
    again = [] if run.state == FINISHED else again_commands(run)
    if not run.checkpoints:
        return again
    export = f"{export_command(run.run_dir, run.best_exam() is not None)} --out {EXPORT_FOLDER}"
    return [*again, f"dflash evaluate {own} --offline", f"dflash evaluate {own}", export]


def again_commands(run: RunFolder) -> list[str]:
    """The command that goes on with the run, also past the step where `stop_at` ended it; of a sweep's run, if any."""
    if run.sweep is not None:
        return run.sweep.again()
    is_at_its_stop = run.config is not None and run.config.stop_at == run.metrics.last_step
    past = " --set stop_at=none" if is_at_its_stop else ""
    here = "" if run.config is None else out_option(run.config.out, run.run_dir)
    return [f"dflash train --config {shlex.quote(str(run.run_dir / CONFIG_NAME))}{here}{past}"]


def exam_rows(
    exams: Sequence[Mapping[str, Any]], losses: Mapping[float, float], most: int
) -> list[tuple[str, str, str]]:
    """(step, loss, acceptance length) of at most so many exams, the last one always among them."""
    every = -(-len(exams) // most)
    rows = []
    for exam in exams[::-every][::-1]:
        loss, length = losses.get(exam["step"]), exam.get("acceptance_length")
        rows.append(
            (
                str(exam["step"]),
                "-" if loss is None else f"{loss:.4f}",
                f"{length:.3f}" if is_finite(length) else NOTHING,
            )
        )
    return rows


def serving(run: RunFolder) -> tuple[list[str], list[str]]:
    """How engines are started with the exported drafter, and what is left out of that."""
    spec, target = run.facts.spec, run.facts.target
    if not run.checkpoints:
        return [], []
    try:
        content = config_of(ZLAB, spec, target, "bfloat16")
    except UserError as error:
        return [], [str(error).splitlines()[0]]
    name = engine_name(target["name"], target["name"])
    return list(serving_commands(ZLAB, content, spec, name, EXPORT_FOLDER)), serving_notes(ZLAB, content, spec)
