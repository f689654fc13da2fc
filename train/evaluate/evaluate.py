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
from ..checkpoint import find_best, find_step, load_drafter
from ..device import compiled_once, pick_device
from ..drafter import Drafter
from ..facts import RunFacts
from ..order import ALL, HELD_OUT_SPLIT, samples_of
from ..outcome import export_command
from ..plots import plot_run
from ..run import default_row_tokens
from ..slot import RowShape, default_anchors
from ..spec import require_recorded
from .acceptance import Acceptance, AnswerCycles
from .config import EvaluateConfig
from .decode import Decoded, DrafterProposer, Target, decode, decode_plain, first_difference
from .evaluate_report import Comparison, EvaluateReport, NamedMismatch
from .evaluation_file import result_path
from .prompts import Prompt, Prompts, asked_prompts, read_lines, recorded_prompts
from .walk import recorded_samples, walk

IDENTITY = ("hidden_size", "vocab_size", "num_layers", "weights_sha256", "tokenizer_sha256")
CPU_ANCHORS = 64  # blocks of one forward on a CPU; bounds its dense mask and scores
OpenTarget = Callable[[str, str, str], Target]
ReadQuestions = Callable[[str, Mapping[str, Any]], Callable[[Any], list[int]]]


def evaluate(
    run_dir: Path, config: EvaluateConfig, open_target: OpenTarget, read_questions: ReadQuestions
) -> EvaluateReport:
    """Examines a checkpoint and saves the result as JSON, whole or not at all.

    Without `config.out` that is evaluation.json in RUN, or evaluation-offline.json with `config.offline`.
    `open_target(name, device, dtype)` loads a target; it is not called with `config.offline`.
    `read_questions(name, template_options)` gives what reads the lines of `config.prompts` (see `asked_prompts`).
    Raises UserError for a run, store or target that is missing or does not fit the others, for prompts of
    which none is usable, and, before the exam, for an `out` that cannot or must not be written.
    """
    device = pick_device(config.device)
    step = find_step(run_dir, config.checkpoint)
    dtype = torch.float32 if device.type == "cpu" or config.tap_dtype == "float32" else None
    drafter, facts = load_drafter(run_dir, str(step), device, dtype)
    torch.set_num_threads(cpu_threads(facts.spec.hidden_size))
    settings = {
        "target": config.target or facts.target["name"],
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
        result = decoded_exam(drafter, facts, config, settings, open_target, read_questions)
    acceptance, comparison, left_out, own = result
    report = EvaluateReport(
        run=str(run_dir),
        step=step,
        acceptance=acceptance,
        comparison=comparison,
        settings=settings | own,
        left_out=left_out,
        next_command=export_command(run_dir, find_best(run_dir) is not None),
    )
    publish(path, (json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n").encode())
    return dataclasses.replace(report, saved=tuple(map(str, [path, *plot_run(run_dir, path)])))


Result = tuple[Acceptance, Comparison | None, list[tuple[str, str]], dict[str, Any]]


def walk_exam(drafter: Drafter, facts: RunFacts, store_dir: Path, limit: int | None) -> Result:
    """The offline walk over the held-out samples of a store; no target is opened."""
    weight = drafter.fc.weight
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
    return acceptance, None, [], {"prompts": f"held-out samples of {store_dir}", "taps": "as recorded"}


def walk_shape(num_recorded: np.ndarray, block_size: int, device_type: str) -> RowShape:
    """Rows that hold the longest sample, with as many anchors as the device takes at once."""
    row_tokens = default_row_tokens(int(num_recorded.max(initial=0)) + 1, device_type)
    tokens = row_tokens if device_type == "cuda" else 8 * CPU_ANCHORS  # one anchor for eight of them
    return RowShape(row_tokens=row_tokens, anchors=default_anchors(tokens, block_size), block_size=block_size)


def decoded_exam(
    drafter: Drafter,
    facts: RunFacts,
    config: EvaluateConfig,
    settings: Mapping[str, Any],
    open_target: OpenTarget,
    read_questions: ReadQuestions,
) -> Result:
    """Every prompt decoded twice by the target: plainly, and with the drafter."""
    lines = read_lines(Path(config.prompts)) if config.prompts else []
    if config.prompts and not lines:
        raise no_prompt(config.prompts, "it is empty")
    recorded = None if config.prompts else recorded_exam(Path(settings["store"]), facts, config.limit)
    target = open_target(settings["target"], settings["device"], config.dtype)
    require_same_target(
        facts, {name: getattr(target.facts, name) for name in IDENTITY}, f"target {target.facts.name!r}"
    )
    if recorded is None:
        options = facts.store["data"].get("facts", {}).get("template_options", {})
        recorded = asked_prompts(lines, read_questions(settings["target"], options), config.limit)
    prompts = fitting(recorded, target.facts.max_positions)
    if config.prompts and not prompts.prompts:
        name, reason = prompts.left_out[0]
        raise no_prompt(config.prompts, f"{len(prompts.left_out)} lines were left out, the first is {name}: {reason}")
    acceptance, comparison = Examiner(drafter, target, config).examine(prompts.prompts)
    own = {
        "target_dtype": target.facts.dtype,
        "prompts": config.prompts or f"held-out samples of {settings['store']}",
        "max_new_tokens": config.answer_tokens,
        "taps": "rounded to bfloat16, as the store records them" if config.tap_dtype == "store" else "in float32",
    }
    return acceptance, comparison, prompts.left_out, own


def no_prompt(path: str, reason: str) -> UserError:
    return UserError(
        f"prompts file {path!r} holds no prompt: {reason}".replace("\n", " "),
        "JSON objects that ask something, like {'prompt': TEXT}, one a line",
        "mend the file, or leave --prompts out to take the store's held-out prompts",
    )


class Examiner:
    """Decodes prompts with one target and one drafter, and compares."""

    def __init__(self, drafter: Drafter, target: Target, config: EvaluateConfig) -> None:
        weight = drafter.fc.weight
        parts, _ = target.frozen()
        self.drafter, self.target, self.config = drafter, target, config
        self.embedding = parts["embedding"].to(weight)
        self.head = parts["head"].to(weight) if "head" in parts else self.embedding

    def examine(self, prompts: list[Prompt]) -> tuple[Acceptance, Comparison]:
        """Both decodings of every prompt; a short one before them warms both up and is not timed."""
        block_size = self.drafter.spec.block_size
        comparison, answers = Comparison(), []
        if prompts:
            self.decode_both(prompts[0], 2 * block_size)
        for prompt in bar("evaluate", "prompt", prompts):
            plain, speculative = self.decode_both(prompt, self.config.answer_tokens)
            answers.append(AnswerCycles(speculative.cycles, prompt.task))
            self.compare(comparison, prompt, plain, speculative)
        return Acceptance(tuple(answers), block_size), comparison

    def decode_both(self, prompt: Prompt, max_new_tokens: int) -> tuple[Decoded, Decoded]:
        """The plain answer and the speculative one."""
        spec, facts = self.drafter.spec, self.target.facts
        limit = min(max_new_tokens, facts.max_positions - len(prompt.ids))
        session = self.target.open(spec.tap_layers)
        plain = decode_plain(session, prompt.ids, max_new_tokens=limit, stop_ids=facts.eos_ids)
        propose = DrafterProposer(self.drafter, self.embedding, self.head, self.config.tap_dtype)
        speculative = decode(
            self.target.open(spec.tap_layers),
            propose,
            prompt.ids,
            block_size=spec.block_size,
            max_new_tokens=limit,
            stop_ids=facts.eos_ids,
        )
        return plain, speculative

    def compare(self, comparison: Comparison, prompt: Prompt, plain: Decoded, speculative: Decoded) -> None:
        """Adds one prompt to the comparison."""
        tokenizer = self.target.tokenizer
        comparison.num_prompts += 1
        comparison.plain_s += plain.wall_s
        comparison.speculative_s += speculative.wall_s
        comparison.num_new_tokens += len(speculative.tokens)
        session = self.target.open(self.drafter.spec.tap_layers)
        found = first_difference(session, prompt.ids, speculative.tokens, plain.tokens)
        comparison.num_equal += found is None
        if found is not None:
            plain_text, speculative_text = (
                "" if token is None else tokenizer.decode([token])
                for token in (found.plain_token, found.speculative_token)
            )
            comparison.mismatches.append(
                NamedMismatch(
                    prompt=prompt.name, plain_text=plain_text, speculative_text=speculative_text, difference=found
                )
            )
        if prompt.answer is not None:
            text = tokenizer.decode(speculative.tokens, skip_special_tokens=True)
            counts = comparison.answers.setdefault(prompt.task, [0, 0])
            counts[0] += text.strip() == prompt.answer.strip()
            counts[1] += 1


def open_store(store_dir: Path, facts: RunFacts) -> StoreReader:
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


def held_out_rows(reader: StoreReader, facts: RunFacts) -> np.ndarray:
    """Reader numbers of the held-out samples; of the run's own store those of its snapshot."""
    is_own = reader.manifest.plan_sha256 == facts.store["plan_sha256"]
    return samples_of(reader, HELD_OUT_SPLIT, facts.segments if is_own else ALL)


def recorded_exam(store_dir: Path, facts: RunFacts, limit: int | None) -> Prompts:
    """The prompts of a store's held-out samples."""
    with open_store(store_dir, facts) as reader:
        return recorded_prompts(reader, held_out_rows(reader, facts), limit=limit)


def require_same_target(facts: RunFacts, found: Mapping[str, Any], where: str) -> None:
    """Raises UserError, naming what differs with both values, unless it is the run's target."""
    for name in IDENTITY:
        if found[name] != facts.target[name]:
            raise UserError(
                f"the {where} has {name} {found[name]}, the run was trained on a store of another target: "
                f"{facts.target['name']!r} with {name} {facts.target[name]}",
                "the target whose states the drafter was trained on",
                f"give {facts.target['name']!r}, or another run",
            )


def fitting(prompts: Prompts, max_positions: int) -> Prompts:
    """The prompts that leave the target room for an answer; the others are left out by name."""
    fit, left_out = [], list(prompts.left_out)
    for prompt in prompts.prompts:
        if 0 < len(prompt.ids) < max_positions:
            fit.append(prompt)
        else:
            left_out.append((prompt.name, f"a prompt of {len(prompt.ids)} tokens, the target takes {max_positions}"))
    return Prompts(fit, left_out)
