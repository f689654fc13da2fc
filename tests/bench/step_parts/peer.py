"""The same drafter in speculators 0.9.0, trained as its own trainer trains it.

Its model needs speculators and pydantic; what its package imports beside them and the model never calls
(openai, datasets, hs_connectors, loguru) is replaced by empty modules where it is not installed. As its trainer has it:
fp32 weights, frozen ones too, autocast to bfloat16, clip at 1.0, AdamW; its loss is cross-entropy with the decay of the
paper. Its anchors are drawn inside its forward, so they are in its time.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from .cases import BLOCK_SIZE, Case
from .ours import StepTime, median_parts, peak_gib
from .table import Part
from .timing import Mark, finish, mark

GAMMA = 7.0  # the paper's for blocks of 16, and ours
WARM_UP = 5
NEVER_CALLED = """
    openai openai.types openai.types.chat openai.types.completion datasets hs_connectors loguru
""".split()


class Unused(ModuleType):
    """A module of which any name can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_speculators() -> Any:
    """The package, with empty modules in place of missing ones that are never called."""
    missing = {name for name in NEVER_CALLED if "." not in name and importlib.util.find_spec(name) is None}
    for name in NEVER_CALLED:
        if name.split(".")[0] in missing:
            module = Unused(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None), []
            sys.modules[name] = module
    return importlib.import_module("speculators")


class Theirs:
    """A random drafter of theirs on `device` with everything that a step of it needs."""

    def __init__(self, case: Case, device: torch.device, loss: str) -> None:
        self.case, self.device = case, device
        package = import_speculators()
        self.loss = importlib.import_module("speculators.losses").resolve_loss_config("ce", loss)
        with device:
            self.model = package.DFlashDraftModel(self.config(package)).to(device)
            draw_frozen(self.model)
        self.model.train()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(named, lr=6e-4, weight_decay=0.0)
        self.rows = [self.host_row(number) for number in range(2)]

    def config(self, package: Any) -> Any:
        from transformers import Qwen3Config

        case = self.case
        layers = Qwen3Config(
            vocab_size=case.vocabulary,
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            head_dim=case.head_dim,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=False,
        )
        layers._attn_implementation = "simple_flex_attention" if self.device.type == "cuda" else "eager"
        return package.DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=case.vocabulary,
            block_size=BLOCK_SIZE,
            aux_hidden_state_layer_ids=list(range(1, 1 + case.taps)),
            mask_token_id=case.vocabulary - 1,
        )

    def host_row(self, number: int) -> dict[str, Tensor]:
        """One packed row as its collate function makes it, pinned as its loader pins it."""
        case, place = self.case, torch.arange(self.case.row_tokens)
        drawn = torch.Generator().manual_seed(number)
        row = {
            "hidden_states": torch.empty(1, case.row_tokens, case.taps * case.hidden, dtype=torch.bfloat16),
            "verifier_last_hidden_states": torch.empty(1, case.row_tokens, case.hidden, dtype=torch.bfloat16),
            "input_ids": torch.randint(0, case.vocabulary - 1, (1, case.row_tokens), generator=drawn),
            "loss_mask": torch.ones(1, case.row_tokens, dtype=torch.int64),
            "document_ids": (place // case.sample_tokens)[None],
            "position_ids": (place % case.sample_tokens)[None],
        }
        for name in ("hidden_states", "verifier_last_hidden_states"):
            row[name].copy_(torch.randn(row[name].shape, device=self.device, dtype=torch.bfloat16))
        return {name: value.pin_memory() for name, value in row.items()} if self.device.type == "cuda" else row

    def run(self, num_steps: int) -> list[list[Mark]]:
        """As `Ours.run`: an update a row, the moments before load, forward and update."""
        marks = []
        for number in range(num_steps):
            begin = mark(self.device)
            batch = {name: value.to(self.device, non_blocking=True) for name, value in self.rows[number % 2].items()}
            loaded = mark(self.device)
            with torch.autocast(self.device.type, torch.bfloat16):
                _, loss, _ = self.model(**batch, loss_config=self.loss, gamma=GAMMA, max_anchors=self.case.anchors)
            self.optimizer.zero_grad()
            loss.backward()
            summed = mark(self.device)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            marks.append([begin, loaded, summed])
            self.last_loss = loss.detach()
        marks.append([mark(self.device)])
        finish(self.device)
        return marks

    def time(self, num_steps: int) -> StepTime:
        return median_parts(self.run(num_steps))


@torch.no_grad()
def draw_frozen(model: Any) -> None:
    """What its trainer would load from the target; NaN until then."""
    model.embed_tokens.weight.normal_(0.0, 0.02)
    model.lm_head.weight.normal_(0.0, 0.02)
    model.verifier_lm_head.weight.copy_(model.lm_head.weight)


def measure(part: Part, case: Case, device: torch.device, loss: str, num_steps: int) -> None:
    """Rows of their side."""
    theirs = Theirs(case, device, loss)
    theirs.run(WARM_UP if device.type == "cuda" else 1)
    taken, again = theirs.time(num_steps), theirs.time(num_steps)
    assert torch.isfinite(theirs.last_loss), "their loss is not finite"
    assert all(bool(torch.isfinite(p).all()) for p in theirs.model.parameters()), "their weights are not finite"
    print(f"speculators, {loss} loss: {taken}", flush=True)
    put_side(part, "speculators", case, taken, again)
    part.put("compiled_frames_speculators", counters["stats"]["unique_graphs"], "count")
    part.facts |= {"speculators": version(), "speculators_loss": loss, "speculators_case": dataclasses.asdict(case)}


def version() -> str:
    from importlib.metadata import version

    return version("speculators")


def put_side(part: Part, side: str, case: Case, taken: StepTime, again: StepTime) -> None:
    """The rows that both sides have."""
    part.put(f"draft_positions_per_s_{side}", case.positions / taken.whole * 1e3, "positions/s")
    part.put(f"draft_positions_per_s_without_load_{side}", case.positions / taken.without_load * 1e3, "positions/s")
    part.put(f"step_ms_{side}", taken.whole, "ms")
    part.put(f"second_run_ms_{side}", again.whole, "ms")
    part.put(f"load_ms_{side}", taken.load, "ms")
    part.put(f"optimizer_ms_{side}", taken.update, "ms")
    part.put(f"peak_gib_{side}", peak_gib(), "GiB")


def put_ratios(part: Part, sides: Sequence[str] = ("ours_beside", "speculators")) -> None:
    """Ours over theirs, where both are there."""
    ours, theirs = sides
    ratios = {"vs_speculators_bf16": "draft_positions_per_s", "peak_memory_vs_speculators": "peak_gib"}
    for name, what in ratios.items():
        pair = [part.values.get(f"{what}_{side}") for side in (ours, theirs)]
        if pair[0] is None or pair[1] is None or not pair[1][0]:
            part.left_out.setdefault(name, "one of the two sides was not measured")
        else:
            part.put(name, pair[0][0] / pair[1][0])
