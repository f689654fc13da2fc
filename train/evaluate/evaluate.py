"""The drafter's exam: decoding with the target, or the offline walk over a store.

Is handed the target by whoever opens it; must not know where targets come from. Before anything
runs it is checked that target, store and run belong together.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import UserError
from ...progress import bar
from ...store.files import publish
from ...store.frozen import read_frozen
from ...store.reader import StoreReader
from ...threads import cpu_threads
from ..checkpoint import find_best
from ..device import compiled_once, pick_device
from ..drafter import Drafter
from ..kernel_options import require_head_dim
from ..order import ALL, HELD_OUT_SPLIT, samples_of
from ..outcome import export_command
from ..plots import plot_prediction, plot_run
from ..run import default_row_tokens
from ..slot import RowShape, default_anchors
from ..spec import require_recorded
from .acceptance import Acceptance
from .config import EvaluateConfig
from .evaluate_report import Comparison, EvaluateReport
from .evaluation_file import result_path
from .examined import Examined, Facts, export_of_folder, load_examined, require_taps_in_range
from .examiner import Examiner
from .prediction import Prediction, foretold
from .prompts import IdsOf, Prompts, ReadLines, asked_prompts, no_prompt, opened_lines, recorded_prompts
from .target import Target
from .turns import examine_turns, fitting
from .walk import recorded_samples, walk

IDENTITY = ("hidden_size", "vocab_size", "num_layers", "weights_sha256", "tokenizer_sha256")
CPU_ANCHORS = 64  # blocks of one forward on a CPU; bounds its dense mask and scores
OpenTarget = Callable[[str, str, str], Target]
ReadQuestions = Callable[[str, Mapping[str, Any]], IdsOf]


def evaluate(
    run_dir: Path,
    config: EvaluateConfig,
    open_target: OpenTarget,
    read_questions: ReadQuestions,
    read_lines: ReadLines,
) -> EvaluateReport:
    """Examines a run's checkpoint, or the drafter of a folder, and saves the result as JSON, whole or not at all.

    Without `config.out` that is evaluation.json in RUN, or evaluation-offline.json with `config.offline`; for a folder
    `config.out` is required, and what else a run would know (see `load_examined`).
    `open_target(name, device, dtype)` loads a target; it is not called with `config.offline`.
    `read_lines(path)` gives the lines of `config.prompts`, and `read_questions(name, template_options)` what they ask
    (see `asked_prompts`).
    Raises UserError for a run, store or target that is missing or does not fit the others, for prompts of
    which none is usable, and, before the exam, for an `out` that cannot or must not be written.
    """
    device = pick_device(config.device)
    dtype = torch.float32 if device.type == "cpu" or config.tap_dtype == "float32" else None
    examined = load_examined(run_dir, config, device, dtype)
    drafter, facts, upcoming = examined.drafter, examined.facts, next_command(run_dir, examined)
    torch.set_num_threads(cpu_threads(facts.spec.hidden_size))
    settings = {
        "target": config.target or facts.target.get("name", "not named"),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "drafter_dtype": str(drafter.fc.weight.dtype).removeprefix("torch."),
        "store": config.store or facts.store_path,
    }
    path = result_path(run_dir, config.out, config.offline)
    if config.offline:
        result = walk_exam(drafter, facts, Path(settings["store"]), config.limit)
    else:
        result = decoded_exam(drafter, facts, config, settings, open_target, read_questions, read_lines)
    acceptance, comparison, left_out, own = result
    report = EvaluateReport(
        run=str(run_dir),
        step=examined.step,
        acceptance=acceptance,
        comparison=comparison,
        settings=settings | own,
        left_out=left_out,
        next_command=upcoming,
    )
    if examined.step is not None and config.prompts is None:  # no earlier exams are in a folder
        report = dataclasses.replace(report, prediction=foretold(run_dir, report.as_dict()))
    publish(path, (json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n").encode())
    if examined.step is None or path.parent.resolve() != run_dir.resolve():  # pictures are of results in RUN
        return dataclasses.replace(report, saved=(str(path),))
    pictures = plot_run(run_dir, path)
    if isinstance(report.prediction, Prediction):
        pictures.append(plot_prediction(run_dir, report.prediction.points))
    return dataclasses.replace(report, saved=tuple(map(str, [path, *pictures])))


def next_command(path: Path, examined: Examined) -> str:
    """What to do with what was examined."""
    return export_of_folder(path) if examined.step is None else export_command(path, find_best(path) is not None)


Result = tuple[Acceptance, Comparison | None, list[tuple[str, str]], dict[str, Any]]


def walk_exam(drafter: Drafter, facts: Facts, store_dir: Path, limit: int | None) -> Result:
    """The offline walk over the held-out samples of a store; no target is opened."""
    weight = drafter.fc.weight
    require_head_dim(facts.spec.head_dim, weight.device.type, "evaluate on the CPU with --device cpu")
    with open_store(store_dir, facts) as reader:
        require_recorded(facts.spec.reach, reader.manifest.window, str(store_dir))
        rows = held_out_rows(reader, facts)[:limit]
        frozen = read_frozen(reader.store_dir)
        embedding = frozen.embedding.to(weight)
        head = embedding if frozen.is_tied else frozen.head.to(weight)
        shape = walk_shape(reader.samples.n[rows], facts.spec.block_size, weight.device.type)
        forward = torch.compile(drafter, fullgraph=True, dynamic=False) if weight.device.type == "cuda" else None
        samples = recorded_samples(reader, bar("walk", "sample", rows), facts.spec.tap_layers)
        with compiled_once(weight.device):
            acceptance = walk(drafter, embedding, head, samples, shape, forward=forward)
    own = {
        "target_weights_sha256": reader.manifest.target["weights_sha256"],
        "prompts": f"held-out samples of {store_dir}",
        "taps": "as recorded",
    }
    return acceptance, None, [], own


def walk_shape(num_recorded: np.ndarray, block_size: int, device_type: str) -> RowShape:
    """Rows that hold the longest sample, with as many anchors as the device takes at once."""
    row_tokens = default_row_tokens(int(num_recorded.max(initial=0)) + 1, device_type)
    tokens = row_tokens if device_type == "cuda" else 8 * CPU_ANCHORS  # one anchor for eight of them
    return RowShape(row_tokens=row_tokens, anchors=default_anchors(tokens, block_size), block_size=block_size)


def decoded_exam(
    drafter: Drafter,
    facts: Facts,
    config: EvaluateConfig,
    settings: Mapping[str, Any],
    open_target: OpenTarget,
    read_questions: ReadQuestions,
    read_lines: ReadLines,
) -> Result:
    """Every prompt decoded twice by the target: plainly, and with the drafter."""
    lines = opened_lines(config.prompts, read_lines) if config.prompts else None
    found = Prompts([], []) if lines else recorded_exam(Path(settings["store"]), facts, config.limit)
    target = open_target(settings["target"], settings["device"], config.dtype)
    require_same_target(
        facts, {name: getattr(target.facts, name) for name in IDENTITY}, f"target {target.facts.name!r}"
    )
    ids_of = None
    if lines:
        options = facts.store["data"].get("facts", {}).get("template_options", {})
        ids_of = read_questions(settings["target"], options)
        found = asked_prompts(lines, ids_of, config.limit, config.prompts or "")
    prompts = fitting(found, target.facts.max_positions)
    if config.prompts and not prompts.prompts:
        name, reason = prompts.left_out[0]
        raise no_prompt(config.prompts, f"{len(prompts.left_out)} lines were left out, the first is {name}: {reason}")
    examiner = Examiner(drafter, target, config)
    acceptance, comparison, prompts = examine_turns(examiner.examine, prompts, ids_of, target)
    own = {
        "target_dtype": target.facts.dtype,
        "target_weights_sha256": target.facts.weights_sha256,
        "prompts": config.prompts or f"held-out samples of {settings['store']}",
        "formats": dict(prompts.formats),
        "max_new_tokens": config.answer_tokens,
        "taps": "rounded to bfloat16, as the store records them" if config.tap_dtype == "store" else "in float32",
        **examiner.settings,
    }
    return acceptance, comparison, prompts.left_out, own


def open_store(store_dir: Path, facts: Facts) -> StoreReader:
    """The store, checked to hold states of the run's target and taps."""
    reader = StoreReader(store_dir, partial=facts.segments != ALL)
    require_same_target(facts, reader.manifest.target, f"store {str(store_dir)!r}")
    missing = [layer for layer in facts.spec.tap_layers if layer not in reader.manifest.tap_layers]
    if missing:
        raise UserError(
            f"the store {str(store_dir)!r} holds the taps {list(reader.manifest.tap_layers)}, not {missing[0]}",
            f"the run's taps {list(facts.spec.tap_layers)}",
            "give the store that the run was trained on, with --store",
        )
    return reader


def held_out_rows(reader: StoreReader, facts: Facts) -> np.ndarray:
    """Reader numbers of the held-out samples; of the run's own store those of its snapshot."""
    is_own = reader.manifest.plan_sha256 == facts.store["plan_sha256"]
    return samples_of(reader, HELD_OUT_SPLIT, facts.segments if is_own else ALL)


def recorded_exam(store_dir: Path, facts: Facts, limit: int | None) -> Prompts:
    """The prompts of a store's held-out samples."""
    with open_store(store_dir, facts) as reader:
        return recorded_prompts(reader, held_out_rows(reader, facts), limit=limit)


def require_same_target(facts: Facts, found: Mapping[str, Any], where: str) -> None:
    """Raises UserError, naming what differs with both values, unless it is the run's target."""
    for name in IDENTITY:
        if name in facts.target and found[name] != facts.target[name]:
            known = facts.target.get("name")
            own = f"{known!r}" if known is not None else "one that its folder does not name,"
            raise UserError(
                f"the {where} has {name} {found[name]}, the drafter was trained for another target: "
                f"{own} with {name} {facts.target[name]}",
                "the target whose states the drafter was trained on",
                f"give {'that target' if known is None else own}, or another drafter",
            )
    require_taps_in_range(facts.spec, found["num_layers"], where)
