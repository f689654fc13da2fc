"""One row through the drafter: forward, loss, backward, and the sums of a whole step.

Nothing is normalised here: gradients and numbers are sums over rows (and, after a reduction, over ranks),
divided once by whoever has them all, so a step does not depend on how its rows were dealt.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .batch import RowBatch
from .config import CHUNK_BLOCKS, LossConfig
from .drafter import Drafter
from .loss import BlockLoss, Head, Teacher, chunk_loss_on, final_norm, frozen_head_loss
from .replay import WARM_UP_ROWS, Replay
from .slot import RowShape
from .slot_counts import slot_numbers
from .slot_weights import static_weights


class StepSums:
    """What the blocks of a step add up to; one flat fp64 tensor, so that ranks reduce it in one call.

    loss = sum of weight * objective, weight = its denominator, blocks = kept blocks, alpha = expected acceptances of
    valid slots (0 without `has_teacher`); per slot 1..B-1 then hits, valid slots, and blocks right up to there.
    """

    HEAD = ("loss", "weight", "blocks", "alpha")

    def __init__(self, block_size: int, device: torch.device, *, has_teacher: bool = False) -> None:
        self.num_slots, self.has_teacher = block_size - 1, has_teacher
        self.values = torch.zeros(len(self.HEAD) + 3 * self.num_slots, dtype=torch.float64, device=device)

    def add(self, result: BlockLoss, valid: Tensor) -> None:
        """Adds one row; `valid` [A, B-1] is 1.0 where a slot counts. Does not wait for the device."""
        right = result.hit * valid  # [A, B-1]
        survived = torch.cumprod(right, dim=1).sum(0)  # [B-1]
        alpha = torch.zeros_like(result.loss) if result.alpha is None else (result.alpha * valid).sum()
        head = torch.stack([result.loss, result.weights.sum(), valid[:, 0].sum(), alpha])
        self.values += torch.cat([head, right.sum(0), valid.sum(0), survived])

    def zero(self) -> None:
        """Forgets all rows."""
        self.values.zero_()

    @property
    def weight(self) -> Tensor:
        """The denominator of the step's gradient, 0-d fp64."""
        return self.values[1]

    def metrics(self) -> dict[str, float]:
        """The step's numbers by name; waits for the device."""
        return self.named(self.values.tolist())

    def named(self, numbers: Sequence[float]) -> dict[str, float]:
        """What `values` held, as numbers under fixed names. Empty where no block counted.

        loss: weighted mean of the objective. acceptance_expected: mean over valid slots of sum of min(p, q), the
        chance that the target keeps a sampled draft, where its distribution is known. The others are teacher-forced
        over sampled anchors, see `slot_numbers`: decoding restarts at the hard tokens, so that the acceptance length
        there differs.
        """
        loss, weight, blocks, alpha = numbers[: len(self.HEAD)]
        slots = numbers[len(self.HEAD) :]
        hits, valid, survived = (slots[i * self.num_slots : (i + 1) * self.num_slots] for i in range(3))
        if not weight or not blocks:
            return {}
        named = {"loss": loss / weight} | slot_numbers(hits, valid, survived, blocks)
        return named | ({"acceptance_expected": alpha / sum(valid)} if self.has_teacher else {})


class TrainStep:
    """Sums gradients and numbers of the rows of a step.

    `embedding` and `head` [V, H] are the target's, never trained; copied to the drafter's device and dtype. `norm`
    [H] is its final norm, which objectives on its own distribution read.
    `gradient_sum` is flat fp32 over all parameters (ranks reduce it in one call), `gradients` are its views,
    one per parameter in the order of `drafter.parameters()`.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        head: Tensor,
        shape: RowShape,
        config: LossConfig,
        *,
        norm: Tensor | None = None,
        norm_eps: float | None = None,
        has_graph: bool = False,
    ) -> None:
        spec = drafter.spec
        weight = drafter.fc.weight
        self.drafter, self.shape, self.config = drafter, shape, config
        self.embedding = embedding.detach().to(weight.device, weight.dtype)
        own_head = self.embedding if head is embedding else head.detach().to(weight.device, weight.dtype)
        self.head = Head(weight=own_head, multiplier=spec.output_multiplier, softcap=spec.logit_softcap)
        self.norm = None if norm is None else norm.detach().to(weight.device, torch.float32)  # [H]
        self.norm_eps = norm_eps if norm_eps is not None else spec.rms_norm_eps
        self.num_rows, self.replay = 0, None
        self.graph_pool = torch.cuda.graph_pool_handle() if has_graph else None  # whoever fills the batch may share it
        self.slot_weights = static_weights(config, shape.block_size).to(weight.device)  # [B-1] fp32
        self.slot_numbers = torch.arange(shape.block_size - 1, device=weight.device)  # [B-1], from 0
        self.sums = StepSums(shape.block_size, weight.device, has_teacher=config.needs_last)
        self.parameters = list(drafter.parameters())
        sizes = [parameter.numel() for parameter in self.parameters]
        self.gradient_sum = torch.zeros(sum(sizes), dtype=torch.float32, device=weight.device)
        pieces = self.gradient_sum.split(sizes)
        self.gradients = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters)]
        self.is_compiled = weight.device.type == "cuda"
        self.rotated = drafter.rotated
        if self.is_compiled:
            self.rotated = torch.compile(drafter.rotated, fullgraph=True, dynamic=False)
        self.chunk_loss = chunk_loss_on(weight.device, config, self.head)
        self.reset()

    def reset(self) -> None:
        """Starts a step: zero gradients, zero sums."""
        self.gradient_sum.zero_()
        self.sums.zero()
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient if parameter.dtype == torch.float32 else None

    def accumulate(self, batch: RowBatch) -> None:
        """Adds one row's un-normalised gradients and numbers; does not wait for the device.

        With `has_graph` (CUDA alone) the third row is captured as a CUDA graph, which runs it and every later one: all
        must come in the same batch.
        """
        self.num_rows += 1
        if self.graph_pool is None or self.num_rows <= WARM_UP_ROWS:
            self.run_row(batch)
            return
        buffers = (*batch.buffers(), self.gradient_sum, self.sums.values, *self.parameters)
        if self.replay is None:
            self.replay = Replay(lambda: self.run_row(batch), buffers, self.graph_pool)
        self.replay(buffers)

    def run_row(self, batch: RowBatch) -> None:
        """Forward, loss, backward and sums of one row, launch by launch."""
        hidden = self.forward(
            batch.taps, self.block_embeds(batch), batch.positions, batch.block_positions, batch.masks
        )  # [Q, H]
        result = self.loss(hidden.detach(), batch)
        hidden.backward(result.gradient)
        for parameter, gradient in zip(self.parameters, self.gradients):
            if parameter.dtype != torch.float32:
                assert parameter.grad is not None
                gradient += parameter.grad
                parameter.grad = None
        self.sums.add(result, batch.valid)

    def loss(self, hidden: Tensor, batch: RowBatch) -> BlockLoss:
        """The loss of one row's hidden [Q, H], with its gradient."""
        return frozen_head_loss(
            hidden,
            self.head,
            batch.labels,
            batch.valid * self.slot_weights,
            chunk_blocks=self.config.chunk_blocks or CHUNK_BLOCKS,
            chunk_loss=self.chunk_loss,
            teacher=self.teacher(batch) if self.config.needs_last else None,
        )

    def teacher(self, batch: RowBatch) -> Teacher:
        """The target's distributions of a row: slot k, held to the token at a+k, has the one at a+k-1."""
        assert batch.last is not None, "this objective reads the target's last states"
        assert self.norm is not None, "and its final norm"
        places = (batch.anchors[:, None] + self.slot_numbers).clamp(max=len(batch.last) - 1)  # [A, B-1]
        return Teacher(final_norm(batch.last, self.norm, self.norm_eps), places)

    def forward(
        self,
        taps: Tensor,
        block_embeds: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        masks: Sequence[Tensor | BlockMask],
    ) -> Tensor:
        """The drafter's forward as the device runs it; inputs and output are those of `Drafter.forward`."""
        rotations = self.drafter.rotation(context_positions), self.drafter.rotation(block_positions)
        return self.rotated(taps, block_embeds, *rotations, masks)

    def infer(self, *inputs: Any) -> Tensor:
        """The drafter's forward for an exam, without gradients: [Q, H].

        On CUDA it runs the frame that training compiled. Grad mode is part of a frame's key, so gradients are on
        there and cut off at once; a second frame would take another minute to compile.
        """
        with torch.set_grad_enabled(self.is_compiled):
            return self.forward(*inputs).detach()

    def block_embeds(self, batch: RowBatch) -> Tensor:
        """Scaled embeddings [Q, H] of the block's tokens."""
        embeds = F.embedding(batch.block_ids, self.embedding)
        scale = self.drafter.spec.embedding_scale
        return embeds if scale == 1.0 else embeds * scale
