"""`dflash serve-check`: the exported drafter in a real engine, beside our own decoding, fact by fact.

The target is opened before and after the engine runs, not beside it, where both would share a card. Is handed whatever
concerns the target by the command line; must not know where targets come from.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...progress import bar, say
from ...store.files import NewFile, publish
from ...threads import cpu_threads
from ..checkpoint import find_step, load_drafter
from ..device import pick_device
from ..drafter import Drafter
from ..evaluate.decode import decode_plain
from ..evaluate.evaluate import IDENTITY, OpenTarget, ReadQuestions, recorded_exam, require_same_target
from ..evaluate.prompts import Prompt, Prompts, ReadLines, asked_prompts, no_prompt, opened_lines
from ..evaluate.target import Target
from ..facts import RunFacts
from .altered import altered_profiles
from .config import ServeCheckConfig
from .diagnosis import diagnose
from .engine import Engine, Installed, Serving, find_engine
from .folder import ServedFolder, folder_differences, prepared
from .outputs import Answers, parting
from .profile import Profile, distance
from .replay import Drafting, profile_of
from .report import Measured, ServeCheckReport
from .server import Server, free_port
from .sglang import Sglang
from .texts import read_text
from .tokens import CHECKED, PROBES, TokenCheck, check_tokens
from .vllm import Vllm

RESULT_NAME, LOG_NAME = "serve-check.json", "serve-check.log"  # in RUN


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSide:
    """What the command line knows of targets.

    `open_target(name, device, dtype)` loads one; `read_lines` and `read_questions` read prompts as for `evaluate`;
    `chat_request(line, template_options)` gives a line's chat as an engine is asked it; `served_path(name)` is the
    folder that an engine is started with.
    """

    open_target: OpenTarget
    read_lines: ReadLines
    read_questions: ReadQuestions
    chat_request: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    served_path: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and how many tokens its answer may have."""

    prompt: Prompt
    limit: int


@dataclass(frozen=True, slots=True)
class Served:
    """What came out of the engine."""

    answers: list[list[int]]
    profile: Profile
    tokens: TokenCheck


def serve_check(run_dir: Path, config: ServeCheckConfig, side: TargetSide) -> ServeCheckReport:
    """Checks a run's checkpoint and saves the result as serve-check.json in RUN, whole or not at all.

    Raises UserError for a run, folder, target or prompts that are missing or do not fit each other, for an engine that
    is not installed or ends by itself; Stalled for one that does not answer in time.
    """
    step, device = find_step(run_dir, config.checkpoint), pick_device(config.device)
    path = run_dir / RESULT_NAME
    NewFile(path).abort()
    drafter, facts = load_drafter(run_dir, str(step), "cpu", torch.float32)
    name = config.target or facts.target["name"]
    differences: list[str] = []
    if config.export is not None and config.compare_folder:
        differences = folder_differences(Path(config.export), facts, drafter.state_dict())
    settings = {"target": name, "device": str(device), "max_new_tokens": config.max_new_tokens}
    measured, log, left_out = None, "", list[tuple[str, str]]()
    if not differences:
        installed = find_engine(config.engine_python or sys.executable, config.engine, (Vllm(), Sglang()))
        with tempfile.TemporaryDirectory(prefix="serve-check-") as scratch:
            target_path = side.served_path(name)
            folder = prepared(run_dir, step, config, target_path, Path(scratch))
            check = Check(run_dir, config, side, drafter, facts, folder, installed, name, target_path, device)
            measured, left_out = check.measure()
        settings |= {"engine_package": installed.package, **check.settings()}
        log = str(check.log_path)
    report = ServeCheckReport(
        run=str(run_dir),
        step=step,
        folder=config.export or f"a new export ({config.format})",
        settings=settings,
        tolerance=config.tolerance,
        is_compared=config.export is None or config.compare_folder,
        folder_differences=differences,
        measured=measured,
        left_out=left_out,
        saved=str(path),
        log=log,
    )
    publish(path, (json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n").encode())
    return report


class Check:
    """One engine's run beside ours."""

    def __init__(
        self,
        run_dir: Path,
        config: ServeCheckConfig,
        side: TargetSide,
        drafter: Drafter,
        facts: RunFacts,
        folder: ServedFolder,
        installed: Installed,
        target_name: str,
        target_path: str,
        device: torch.device,
    ) -> None:
        self.config, self.side, self.facts, self.folder = config, side, facts, folder
        self.drafter, self.installed, self.device = drafter, installed, device
        self.target_name, self.target_path = target_name, target_path
        self.log_path = run_dir / LOG_NAME
        self.template_options = facts.store["data"].get("facts", {}).get("template_options", {})
        self.dtype = "auto"

    def settings(self) -> dict[str, Any]:
        """What it was measured with."""
        return {
            "layout": self.folder.layout,
            "dtype": self.dtype,
            "drafter_dtype": self.folder.dtype,
            "prompts": self.config.prompts or f"held-out samples of {self.facts.store_path}",
            "engine_args": self.config.engine_args,
            "torch": torch.__version__,
        }

    def measure(self) -> tuple[Measured, list[tuple[str, str]]]:
        """Both sides, and the prompts left out."""
        torch.set_num_threads(cpu_threads(self.facts.spec.hidden_size))
        target = self.open()
        self.dtype = target.facts.dtype
        found = self.prompts()
        asked, left_out = self.fitting(found, target.facts.max_positions)
        layers = self.facts.spec.tap_layers
        plain = [
            decode_plain(
                target.open(layers), one.prompt.ids, max_new_tokens=one.limit, stop_ids=target.facts.eos_ids
            ).tokens
            for one in bar("plain", "prompt", asked)
        ]
        tokenizer = target.tokenizer
        if self.device.type == "cuda":
            del target
            gc.collect()
            torch.cuda.empty_cache()
            target = None
        served = self.serve(asked, tokenizer)
        target = target or self.open()
        return self.judge(target, asked, plain, served), left_out

    def open(self) -> Target:
        """The target, checked to be the run's."""
        target = self.side.open_target(self.target_name, str(self.device), self.config.dtype)
        found = {name: getattr(target.facts, name) for name in IDENTITY}
        require_same_target(self.facts, found, f"target {target.facts.name!r}")
        return target

    def prompts(self) -> Prompts:
        if self.config.prompts is None:
            return recorded_exam(Path(self.facts.store_path), self.facts, self.config.limit)
        lines = opened_lines(self.config.prompts, self.side.read_lines)
        ids_of = self.side.read_questions(self.target_name, self.template_options)
        return asked_prompts(lines, ids_of, self.config.limit, self.config.prompts)

    def fitting(self, found: Prompts, max_positions: int) -> tuple[list[Asked], list[tuple[str, str]]]:
        """The prompts that leave room for an answer and for the drafts behind it. Raises UserError for none."""
        room, left_out, asked = max_positions - 2 * self.facts.spec.block_size, list(found.left_out), list[Asked]()
        for prompt in found.prompts:
            limit = min(self.config.max_new_tokens, room - len(prompt.ids))
            if limit >= 2:
                asked.append(Asked(prompt, limit))
            else:
                left_out.append(
                    (prompt.name, f"a prompt of {len(prompt.ids)} tokens, the target takes {max_positions}")
                )
        if not asked:
            reason = f"the first left out is {left_out[0][0]}: {left_out[0][1]}" if left_out else "there is none"
            raise no_prompt(self.config.prompts or self.facts.store_path, reason)
        return asked, left_out

    def serve(self, asked: Sequence[Asked], tokenizer: Any) -> Served:
        """Starts the engine, asks everything, and ends it."""
        engine, spec = self.installed.engine, self.facts.spec
        serving = Serving(
            target=self.target_path,
            folder=self.folder.path,
            layout=self.folder.layout,
            block_size=spec.block_size,
            dtype=self.dtype,
            device_type=self.device.type,
            max_tokens=max(len(one.prompt.ids) + one.limit for one in asked) + 2 * spec.block_size,
            port=free_port(),
            extra=self.config.extra_arguments,
        )
        command = engine.command(self.installed.python, serving)
        say(f"starting {self.installed.package}; its output goes to {self.log_path}")
        with Server(command, engine.environment(serving), serving.port, self.log_path, self.config.request_s) as server:
            waited_s = server.wait_until_healthy(engine.health_path, self.config.start_s)
            say(f"the engine answers after {waited_s:.0f} s")
            tokens = self.check_tokens(engine, server, asked, tokenizer)
            engine.begin(server)
            answers = [engine.answer(server, one.prompt.ids, one.limit) for one in bar("engine", "prompt", asked)]
            return Served(answers, engine.profile(server, spec.block_size - 1), tokens)

    def check_tokens(self, engine: Engine, server: Server, asked: Sequence[Asked], tokenizer: Any) -> TokenCheck:
        """The engine's tokens of our prompts: of their texts and their chats, or of two chats where none are known."""
        prompts = [one.prompt for one in asked[:CHECKED]]
        lines = [(prompt.name, prompt.asked, prompt.ids) for prompt in prompts if prompt.asked]
        if not lines and getattr(tokenizer, "chat_template", None):
            ids_of = self.side.read_questions(self.target_name, self.template_options)
            probes = [{"messages": messages} for messages in PROBES]
            lines = [(f"a chat of {len(chat['messages'])} messages", chat, ids_of(chat)) for chat in probes]
        return check_tokens(
            engine,
            server,
            [(name, self.side.chat_request(line, self.template_options), ids) for name, line, ids in lines],
            [(prompt.name, tokenizer.decode(prompt.ids)) for prompt in prompts],
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        )

    def judge(self, target: Target, asked: Sequence[Asked], plain: list[list[int]], served: Served) -> Measured:
        """Answers and acceptance beside ours; the cause where acceptance disagrees."""
        spec = self.facts.spec
        prompts = [(one.prompt.name, one.prompt.ids) for one in asked]
        partings = [
            found
            for prompt, ours, its in zip(prompts, plain, served.answers, strict=True)
            if (found := parting(target, spec.tap_layers, prompt, ours, its)) is not None
        ]
        drafting = self.drafting(target)
        answered = [(ids, answer) for (_, ids), answer in zip(prompts, served.answers) if answer]
        behind = max(0, spec.block_size - 2)
        texts = [
            read_text(target, ids, answer, spec.tap_layers, behind) for ids, answer in bar("ours", "prompt", answered)
        ]
        ours = profile_of(drafting, texts)
        diagnosis = None
        if distance(served.profile, ours) > self.config.tolerance:
            altered = altered_profiles(drafting, target, answered)
            diagnosis = diagnose(served.profile, ours, altered, self.config.tolerance)
        answers = Answers(len(asked), tuple(partings))
        return Measured(engine=served.profile, ours=ours, answers=answers, tokens=served.tokens, diagnosis=diagnosis)

    def drafting(self, target: Target) -> Drafting:
        """Our drafter with weights as rounded as the folder's, in the engine's number format."""
        weights = getattr(torch, self.folder.dtype)
        drafter = self.drafter.to(weights).to(self.device, getattr(torch, self.dtype))
        parts, _ = target.frozen()
        embedding = parts["embedding"].to(drafter.fc.weight)
        head = parts["head"].to(drafter.fc.weight) if "head" in parts else embedding
        return Drafting.of(drafter, embedding, head)
