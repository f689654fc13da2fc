"""Which kernels a target's recurrent layers run on: fast packages, or transformers' plain torch.

transformers decides when a modelling file is imported, in `use_kernel_func_from_hub_with_fallback`, and keeps the
decision in the closure of each such function; it is read there (transformers 5.17 to 5.24), so a package that is
installed but cannot be imported counts as absent. Delete the reading when transformers offers it by name.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

FAST_PACKAGES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
MINOR = {"causal_conv1d"}  # in plain torch a twelfth of the rate is lost (docs/benchmarks/hybrid_kernels.json)
LOGGER = "transformers.integrations.hub_kernels"
DECISION = "is_new_implementation"  # in the closure: True where a package's function was taken


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of the recurrent layers that has a fast form, and whether that form is the one in use."""

    function: str
    package: str
    is_fast: bool

    @property
    def distribution(self) -> str:
        return FAST_PACKAGES.get(self.package, self.package)


def hide_gpu_kernels(device: str) -> None:
    """Hides the GPU's kernel packages from transformers in a process that runs on a CPU.

    transformers 5.24 takes any importable fla for Gated DeltaNet, on CPU tensors too, and dies there ("0 active
    drivers", "cpu tensor?"); delete this when it asks for the device. Must run before a modelling file is imported.
    """
    if not str(device).startswith("cpu"):
        return
    for name in FAST_PACKAGES:
        if sys.modules.get(name, False) is not None and importlib.util.find_spec(name) is not None:
            sys.modules[name] = None  # type: ignore[assignment]


def mute_fallbacks() -> None:
    """Drops transformers' own lines about plain torch, which name packages that help no CPU; ours replace them."""
    logging.getLogger(LOGGER).addFilter(is_no_fallback)  # adding it again changes nothing


def is_no_fallback(record: logging.LogRecord) -> bool:
    return "falling back to its reference PyTorch implementation" not in record.getMessage()


def kernels_of(decoder: nn.Module) -> tuple[Kernel, ...]:
    """The functions with a fast form in the modelling files of a decoder's modules; none where there are none."""
    files = {type(module).__module__ for module in decoder.modules()}
    modules = [sys.modules[name] for name in sorted(files) if name.startswith("transformers.models.")]
    found = {kernel.function: kernel for module in modules for kernel in kernels_in(module)}
    return tuple(found[name] for name in sorted(found))


def kernels_in(module: ModuleType) -> Iterator[Kernel]:
    for value in vars(module).values():
        if callable(value) and not isinstance(value, type):
            closure = deciding_closure(value)
            if closure is not None:
                yield Kernel(closure["func_name"], closure["package"], bool(closure[DECISION]))


def deciding_closure(function: Callable[..., Any], depth: int = 4) -> dict[str, Any] | None:
    """The closure that holds the decision, of a function or of one that it wraps."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    closure: dict[str, Any] = {name: cell.cell_contents for name, cell in zip(names, cells)}
    if {DECISION, "func_name", "package"} <= set(closure):
        return closure
    inner = [value for value in (*closure.values(), getattr(function, "__wrapped__", None)) if callable(value)]
    found = (deciding_closure(value, depth - 1) for value in inner) if depth else iter(())
    return next((one for one in found if one is not None), None)


def slow_kernels(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    """Those whose plain torch form costs much: the recurrences themselves."""
    return [kernel for kernel in kernels if not kernel.is_fast and kernel.package not in MINOR]


def kernel_note(target: str, kernels: tuple[Kernel, ...], device: str) -> str:
    """One line about what the recurrent layers of a target run on."""
    slow = [kernel for kernel in kernels if not kernel.is_fast]
    if not kernels:
        return f"target {target!r}: its recurrent layers run in transformers' own code; it knows no faster kernels"
    if device.startswith("cpu"):
        return f"target {target!r}: its recurrent layers run in plain torch, as always on a CPU"
    if not slow:
        return f"target {target!r}: its recurrent layers run on fast kernels ({', '.join(distributions(kernels))})"
    functions = ", ".join(kernel.function for kernel in slow)
    return f"target {target!r}: {functions} in plain torch (without {', '.join(distributions(slow))}): slower"


def distributions(kernels: tuple[Kernel, ...] | list[Kernel]) -> list[str]:
    return sorted({kernel.distribution for kernel in kernels})
