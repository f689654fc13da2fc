"""The exam with a target: every prompt decoded plainly and with the drafter, and both compared."""

import hashlib
from collections.abc import Sequence
from typing import Any

from ...progress import bar
from ..drafter import Drafter
from .acceptance import Acceptance
from .config import EvaluateConfig
from .decode import first_difference
from .drafting import DrafterProposer
from .evaluate_report import Comparison, NamedMismatch, PromptOutcome
from .lockstep import Decoded, OneByOne, TargetSide, Together, serve
from .prompts import Prompt
from .sampling import PLAIN, SPECULATIVE, Sampling
from .steps import plain, speculative
from .target import Session, Target

CUDA_BATCH = 8  # prompts decoded together where nothing else is asked for
GROUP = 4  # batches that are decoded plainly before the same prompts are decoded speculatively


class Examiner:
    """Decodes prompts with one target and one drafter, and compares.

    A prompt's draws depend on its name and on the seed alone, see `number_of`.
    Raises UserError for a batch that the target does not compute right.
    """

    def __init__(self, drafter: Drafter, target: Target, config: EvaluateConfig) -> None:
        weight = drafter.fc.weight
        parts, _ = target.frozen()
        self.drafter, self.target, self.config = drafter, target, config
        self.embedding = parts["embedding"].to(weight)
        self.head = parts["head"].to(weight) if "head" in parts else self.embedding
        self.sampling = Sampling(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, seed=config.seed
        )
        self.batch = config.batch or (CUDA_BATCH if weight.device.type == "cuda" else 1)
        self.batch_note = ""
        if self.batch > 1 and target.single_reason is not None:
            self.batch, self.batch_note = 1, target.single_reason
        self.target_side()

    @property
    def settings(self) -> dict[str, Any]:
        """How tokens were chosen and how many prompts ran together, for the result."""
        sampling = self.sampling
        return {
            "decoding": str(sampling),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": None if sampling.is_greedy else sampling.seed,
            "batch": self.batch,
            "batch_note": self.batch_note,
        }

    def examine(self, prompts: Sequence[Prompt]) -> tuple[Acceptance, Comparison]:
        """Both decodings of every prompt; short ones before them warm both up and are not timed."""
        block_size = self.drafter.spec.block_size
        comparison, answers = Comparison(), []
        self.decode_both(prompts[: self.batch], 2 * block_size)
        size = 1 if self.batch == 1 else GROUP * self.batch
        with bar("evaluate", "prompt", total=len(prompts)) as shown:
            for begin in range(0, len(prompts), size):
                group = prompts[begin : begin + size]
                for prompt, *both in zip(group, *self.decode_both(group, self.config.answer_tokens), strict=True):
                    answers.append(prompt.answered(both[1].cycles))
                    comparison.outcomes.append(self.compared(prompt, *both))
                shown.update(len(group))
        return Acceptance(tuple(answers), block_size), comparison

    def decode_both(self, prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[list[Decoded], list[Decoded]]:
        """The plain answers and the speculative ones."""
        block_size, facts = self.drafter.spec.block_size, self.target.facts
        ends = [
            {
                "max_new_tokens": min(max_new_tokens, facts.max_positions - len(prompt.ids)),
                "stop_ids": facts.eos_ids,
            }
            for prompt in prompts
        ]
        texts = [
            plain(prompt.ids, self.sampling.chooser(number_of(prompt), PLAIN), **end)
            for prompt, end in zip(prompts, ends)
        ]
        alone = serve(texts, self.target_side(), None, self.batch)
        texts = [
            speculative(prompt.ids, self.sampling.chooser(number_of(prompt), SPECULATIVE), block_size=block_size, **end)
            for prompt, end in zip(prompts, ends)
        ]
        return alone, serve(texts, self.target_side(), self.proposer(), self.batch)

    def open_session(self) -> Session:
        return self.target.open(self.drafter.spec.tap_layers)

    def target_side(self) -> TargetSide:
        """Nothing but an empty cache."""
        if self.batch == 1:
            return OneByOne(self.open_session)
        return Together(self.open_session, self.target.open_batch(self.drafter.spec.tap_layers))

    def proposer(self) -> DrafterProposer:
        facts, is_drawn = self.target.facts, not self.sampling.is_greedy
        return DrafterProposer(
            self.drafter,
            self.embedding,
            self.head,
            self.config.tap_dtype,
            output_multiplier=facts.output_multiplier if is_drawn else 1.0,
            softcap=facts.logit_softcap if is_drawn else None,
        )

    def compared(self, prompt: Prompt, plain: Decoded, speculative: Decoded) -> PromptOutcome:
        """Both answers of one prompt and, where both are greedy, where they part."""
        tokenizer = self.target.tokenizer
        mismatch = self.mismatch(prompt, plain, speculative) if self.sampling.is_greedy else None
        is_right = None
        if prompt.answer is not None:
            text = tokenizer.decode(speculative.tokens, skip_special_tokens=True)
            is_right = text.strip() == prompt.answer.strip()
        return PromptOutcome(
            name=prompt.name,
            task=prompt.task,
            plain_tokens=tuple(plain.tokens),
            num_new_tokens=len(speculative.tokens),
            plain_s=plain.wall_s,
            speculative_s=speculative.wall_s,
            is_compared=self.sampling.is_greedy,
            mismatch=mismatch,
            is_right=is_right,
        )

    def mismatch(self, prompt: Prompt, plain: Decoded, speculative: Decoded) -> NamedMismatch | None:
        """Where both greedy answers part."""
        found = first_difference(self.open_session, prompt.ids, speculative, plain, self.drafter.spec.block_size)
        if found is None:
            return None
        plain_text, speculative_text = (
            "" if token is None else self.target.tokenizer.decode([token])
            for token in (found.plain_token, found.speculative_token)
        )
        return NamedMismatch(
            prompt=prompt.name, plain_text=plain_text, speculative_text=speculative_text, difference=found
        )


def number_of(prompt: Prompt) -> int:
    """A number for the draws of a prompt, from its name: `--limit` and lines that are left out change nothing."""
    return int.from_bytes(hashlib.sha256(prompt.name.encode(errors="backslashreplace")).digest()[:8], "little")
