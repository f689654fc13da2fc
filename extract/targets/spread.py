"""One target on several GPUs of a worker: whole layers on each, by transformers' device map.

Not measured yet, and not run on GPUs yet: a batch passes them one after another, so they save memory and no time.
"""

from collections.abc import Sequence
from typing import Any

from ... import UserError

KEPT_FREE = 0.15
"""Share of a GPU's free memory that the weights leave to the states, logits and kernels of a batch; a guess."""


def spread_over(devices: Sequence[str]) -> dict[str, Any]:
    """What transformers' `from_pretrained` is told so that layers lie on these CUDA devices and nowhere else."""
    import torch

    return device_map({device: torch.cuda.mem_get_info(device)[0] for device in devices})


def device_map(free_bytes: dict[str, int]) -> dict[str, Any]:
    """The same from the free bytes of each device, like "cuda:1"."""
    limits = {int(device.removeprefix("cuda:")): int((1 - KEPT_FREE) * free) for device, free in free_bytes.items()}
    return {"device_map": "auto", "max_memory": limits}


def require_on_devices(model: Any, name: str) -> None:
    """Raises UserError where a part of the model found no room on the GPUs and would be run from elsewhere."""
    elsewhere = sorted(part for part, place in model.hf_device_map.items() if place in ("cpu", "disk"))
    if elsewhere:
        raise UserError(
            f"target {name!r} does not fit: {elsewhere[0]!r} and {len(elsewhere) - 1} more parts found no room",
            "GPUs that hold all of it",
            "raise --gpus-per-shard",
        )
