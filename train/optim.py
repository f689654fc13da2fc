"""The optimizer: fp32 masters, Muon for matrices, AdamW for the rest, and the learning rate of each step.

Knows parameters and gradients by name; no drafter, no loss. The learning rate is a pure function of the
step, so a resumed run needs no scheduler state.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import UserError
from .config import OptimConfig

PEAKS = {"muon": 0.02, "adamw": 6e-4}  # adamw: the paper (dflash-spec 2.7)


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did."""

    number: int  # 0-based
    lr: float  # of the matrices
    gradient_norm: Tensor  # 0-d, of the normalised gradient, before the clip


def lr_share(config: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of update `step` (0-based) as a share of the peak.

    Linear warm-up over `warmup_share` of the steps, the first above 0; then constant, or a cosine to
    `final_share`, or (wsd) flat until the last `decay_share` of the steps, which fall linearly to
    `final_share` at the last one.
    """
    warmup = round(config.warmup_share * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    falling = total_steps - warmup
    if config.schedule == "wsd":
        falling = min(round(config.decay_share * total_steps), falling)
    if falling == 0:
        return 1.0
    done = min(max((step - (total_steps - falling) + 1) / falling, 0.0), 1.0)
    height = 1.0 - done if config.schedule == "wsd" else 0.5 + 0.5 * math.cos(math.pi * done)
    return config.final_share + (1.0 - config.final_share) * height


def peak_of(config: OptimConfig) -> float:
    """The learning rate of the matrices at its height."""
    return config.lr if config.lr is not None else PEAKS[config.name]


class Unsound(UserError):
    """An update that must not be kept."""


def require_sound(number: int, weight: float, norm: float, loss: float = 0.0) -> None:
    """Raises Unsound for an update without a label, or whose gradient or loss is not finite."""
    if not weight > 0:
        raise Unsound(
            f"update {number} has no label to learn from (weight {weight})",
            "at least one valid slot in the rows of a step",
            "raise rows.anchors or check the loss masks of the store",
        )
    if not math.isfinite(norm) or not math.isfinite(loss):
        raise Unsound(
            f"the gradient of update {number} has the norm {norm}"
            + ("" if math.isfinite(loss) else f", its loss is {loss}"),
            "a finite gradient and a finite loss",
            "lower the learning rate (--lr), and check the store with `dflash verify`",
        )


class MasterOptimizer:
    """Updates fp32 masters and rounds them into the parameters.

    A parameter in fp32 is its own master; one in bfloat16 gets a master beside it, without which small
    updates round away (dflash-spec 2.7). The order of `named_parameters` is the order of the gradients.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, total_steps: int
    ) -> None:
        named = dict(named_parameters)
        self.config, self.total_steps, self.num_steps = config, total_steps, 0
        self.names, self.parameters = list(named), list(named.values())
        self.masters = [
            p.detach() if p.dtype == torch.float32 else p.detach().to(torch.float32) for p in self.parameters
        ]
        self.is_fused = self.masters[0].is_cuda  # one kernel reads and writes each number once
        self.peak = peak_of(config)
        self.parts = self.build()

    def build(self) -> list[tuple[torch.optim.Optimizer, float]]:
        """Each inner optimizer with its peak learning rate."""
        config = self.config
        matrices = [master for master in self.masters if master.dim() == 2]
        others = [master for master in self.masters if master.dim() != 2]
        betas = (config.beta1, config.beta2)
        if config.name == "adamw":
            groups = [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
            return [(torch.optim.AdamW(groups, lr=self.peak, betas=betas, fused=self.is_fused), self.peak)]
        muon = torch.optim.Muon(matrices, lr=self.peak, weight_decay=config.weight_decay, momentum=config.momentum)
        adamw = torch.optim.AdamW(others, lr=config.adamw_lr, betas=betas, weight_decay=0.0, fused=self.is_fused)
        return [(muon, self.peak), (adamw, config.adamw_lr)]

    def lr(self, step: int) -> float:
        """Learning rate of the matrices at update `step` (0-based)."""
        return self.peak * lr_share(self.config, step, self.total_steps)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], weight: Tensor) -> Update:
        """One update from gradient sums (fp32, in the parameters' order), divided here by `weight`, 0-d.

        Scales the sums in place. Does not wait for the device: whoever reads the numbers later calls `require_sound`
        before anything of this update is kept. On a CPU that is done here, before anything has changed.
        """
        norm = torch.nn.utils.get_total_norm(gradients) / weight
        if weight.device.type == "cpu":
            require_sound(self.num_steps, float(weight), float(norm))
        scale = torch.reciprocal(weight)
        if self.config.clip:
            scale = scale * (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients), scale.to(torch.float32))  # pyright: ignore[reportPrivateImportUsage]
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        share = lr_share(self.config, self.num_steps, self.total_steps)
        for optimizer, peak in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
        update = Update(self.num_steps, self.peak * share, norm)
        self.finish()
        return update

    def finish(self) -> None:
        """Lets the gradients go and rounds the masters into the parameters."""
        for master in self.masters:
            master.grad = None
        self.round_masters()
        self.num_steps += 1

    @torch.no_grad()
    def round_masters(self) -> None:
        """Copies each master into its parameter, where they are two tensors."""
        rounded = [(p, m) for p, m in zip(self.parameters, self.masters) if p.dtype != torch.float32]
        if rounded:
            parameters, masters = ([pair[side] for pair in rounded] for side in (0, 1))
            torch._foreach_copy_(parameters, masters)  # pyright: ignore[reportPrivateImportUsage]

    def checksum(self) -> str:
        """Of the bits of masters and moments, 8 hex digits; waits for the device."""
        moments = [t for o, _ in self.parts for state in o.state.values() for t in state.values() if t.dim()]
        sums = [tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in (*self.masters, *moments)]
        return f"{zlib.crc32(torch.stack(sums).cpu().numpy().tobytes()):08x}"

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs besides fp32 parameters themselves; tensors are not copied."""
        masters = {
            name: master
            for name, parameter, master in zip(self.names, self.parameters, self.masters)
            if parameter.dtype != torch.float32
        }
        return {
            "num_steps": self.num_steps,
            "names": list(self.names),
            "masters": masters,
            "parts": [optimizer.state_dict() for optimizer, _ in self.parts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`, bit for bit; the parameters are set from the masters where they differ.

        Raises UserError for the state of other parameters or of another optimizer.
        """
        if list(state["names"]) != self.names or len(state["parts"]) != len(self.parts):
            raise UserError(
                f"an optimizer state of {len(state['names'])} parameters in {len(state['parts'])} parts",
                f"the {len(self.names)} parameters of this drafter in {len(self.parts)} parts, same names and order",
                "resume with the drafter and the optimizer of the run",
            )
        for name, parameter, master in zip(self.names, self.parameters, self.masters):
            if parameter.dtype != torch.float32:
                master.copy_(state["masters"][name])
        for (optimizer, _), part in zip(self.parts, state["parts"]):
            optimizer.load_state_dict(part)
        self.round_masters()
        self.num_steps = int(state["num_steps"])
