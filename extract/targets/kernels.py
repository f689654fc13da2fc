"""Which kernels a target's recurrent layers really run on: fast packages, or transformers' plain torch.

transformers decides by itself when a modelling file is imported, and says in its log which functions fell back to
plain torch (`use_kernel_func_from_hub_with_fallback`, transformers 5.15 to 5.24). Its word is taken here, and kept;
a package that is installed but broken falls back as well.
"""

import importlib.util
import logging
import re
import sys

import torch

FAST_PACKAGES = ("fla", "causal_conv1d")
FALLBACK = re.compile(r"`(\w+)` is falling back to its reference PyTorch implementation because `([\w-]+)`")
LOGGER = "transformers.integrations.hub_kernels"


class FallbackListener(logging.Filter):
    """Takes the messages about fall-backs out of transformers' log and keeps what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, str] = {}  # function -> the distribution that would make it fast

    def filter(self, record: logging.LogRecord) -> bool:
        found = FALLBACK.search(record.getMessage())
        if found is None:
            return True
        self.heard[found[1]] = found[2]
        return False


LISTENER = FallbackListener()


def listen() -> None:
    """Must run before the first forward of a process: each message comes once."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.WARNING)  # also where the user silenced transformers
    logger.addFilter(LISTENER)  # adding it again changes nothing


def hide_gpu_kernels() -> None:
    """Hides fla and causal_conv1d from transformers where CUDA is absent.

    transformers 5.24 takes any importable fla for Gated DeltaNet and then dies on CPU tensors
    ("0 active drivers"), see `use_kernel_func_from_hub_with_fallback`; delete this when it asks
    for the device. Must run before a modelling file of transformers is imported.
    """
    if torch.cuda.is_available():
        return
    for name in FAST_PACKAGES:
        if name not in sys.modules and importlib.util.find_spec(name) is not None:
            sys.modules[name] = None  # type: ignore[assignment]


def fallbacks() -> dict[str, str]:
    """Functions that ran in plain torch so far in this process, each with the distribution that it lacks."""
    return dict(LISTENER.heard)


def needed_fallbacks() -> dict[str, str]:
    """Those of `fallbacks` that cost most: the recurrences themselves.

    Measured (docs/benchmarks/hybrid_kernels.json): the recurrence in plain torch costs a third of the rate, the short
    convolution in plain torch a twelfth.
    """
    return {function: package for function, package in fallbacks().items() if not function.startswith("causal_conv1d")}


def kernel_note(target: str) -> str:
    """One line about the kernels of a recurrent target, after it ran a forward."""
    slow = fallbacks()
    if not slow:
        return f"target {target!r}: its recurrent layers run on fast kernels"
    missing = ", ".join(sorted(set(slow.values())))
    return f"target {target!r}: {', '.join(sorted(slow))} in plain torch (without {missing}): correct, and slower"
