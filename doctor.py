"""The doctor: every room checks itself on this machine and says so in one line each.

It repairs nothing and downloads nothing. A line is ok, a note (slower or optional), or a
fault (something that the commands need).
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import __version__

CHECKED_BYTES = 16 << 20
SLOW_GB_S = 5.0  # of checksums: a disk array is as fast


@dataclass
class Examination:
    """Lines of (grade, subject, finding); grades are ok, note, fault."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, grade: str, subject: str, finding: str) -> None:
        self.lines.append((grade, subject, finding))

    @property
    def is_healthy(self) -> bool:
        return not any(grade == "fault" for grade, _, _ in self.lines)

    def text(self) -> str:
        rows = [f"{grade:5}  {subject:16}  {finding}" for grade, subject, finding in self.lines]
        verdict = "this machine is ready" if self.is_healthy else "faults above must be mended first"
        return "\n".join([*rows, verdict])


def examine() -> Examination:
    """Runs every check; a check that raises is itself a fault, named."""
    found = Examination()
    checks: list[Callable[[Examination], None]] = [
        python, commands, packages, torch_and_devices, kernels, memory, disk, store, targets, drafter,
    ]  # fmt: skip
    for check in checks:
        try:
            check(found)
        except Exception as error:  # whatever a broken installation raises: the other checks still speak
            told = " ".join(str(error).split())
            found.add("fault", check.__name__, f"the check itself failed: {type(error).__name__}: {told}")
    return found


def python(found: Examination) -> None:
    grade = "ok" if sys.version_info >= (3, 11) and sys.platform == "linux" else "fault"
    found.add(
        grade,
        "python",
        f"{platform.python_version()} on {sys.platform} {platform.machine()}, dflash-offline {__version__}",
    )


def commands(found: Examination) -> None:
    """Who owns the `dflash` script: another distribution installs one of the same name."""
    owners = sorted(
        {
            entry.dist.name
            for entry in importlib.metadata.entry_points(group="console_scripts")
            if entry.name == "dflash" and entry.dist is not None
        }
    )
    path = shutil.which("dflash")
    if owners == ["dflash-offline"] and path:
        found.add("ok", "dflash command", f"{path} is ours")
    elif len(owners) > 1:
        first = Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
        whose = "ours" if "dflash_offline" in first else "not ours"
        found.add(
            "note",
            "dflash command",
            f"claimed by {', '.join(owners)}; {path} is {whose}; `dflash-offline` always is ours",
        )
    else:
        found.add(
            "note", "dflash command", f"not on PATH as ours ({path}); `python -m dflash_offline.cli` always works"
        )


def packages(found: Examination) -> None:
    names = ["torch", "transformers", "tokenizers", "pyarrow", "zarr", "numpy", "safetensors", "awscrt"]
    found.add("ok", "packages", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def torch_and_devices(found: Examination) -> None:
    import torch

    if not torch.cuda.is_available():
        found.add("note", "devices", f"no CUDA device; the CPU path runs on {os.cpu_count()} cores")
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found.add("ok", f"cuda:{number}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")


def kernels(found: Examination) -> None:
    """Optional kernels: they only help on CUDA."""
    import torch

    for package, module, without in (
        ("triton", "triton", "training on CUDA cannot compile its attention"),
        ("fla", "fla.ops.gated_delta_rule", "hybrids (Gated DeltaNet) are refused by extract unless --slow-kernels"),
        ("causal_conv1d", "causal_conv1d", "optional: hybrids lose about a twelfth of the rate"),
    ):
        is_there = importlib.util.find_spec(package) is not None
        if not torch.cuda.is_available():
            found.add("ok", package, f"{'installed' if is_there else 'not installed'}, not used on a CPU")
        elif not is_there:
            found.add("note", package, f"not installed: {without}")
        else:
            try:
                importlib.import_module(module)
                found.add("ok", package, "installed and imported")
            except Exception as error:  # whatever a broken build raises; transformers takes it as absent too
                found.add("note", package, f"cannot be imported ({type(error).__name__}: {error}): {without}")


def memory(found: Examination) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    found.add(
        "ok" if total > 3 * 2**30 else "note",
        "memory",
        f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free (the demo needs 3)",
    )


def disk(found: Examination) -> None:
    free = shutil.disk_usage(".").free
    found.add("ok" if free > 2**30 else "note", "disk", f"{free / 2**30:.1f} GiB free in {os.getcwd()}")


def store(found: Examination) -> None:
    """A ring between two views of one memory, and a checksum."""
    from .store.checksum import crc32c
    from .store.ring import Ring

    ring = Ring.create(4096, 2)
    try:
        ring.slot(1)[:4] = (1, 2, 3, 4)
        other = Ring.open(ring.handle())
        is_shared = bytes(other.slot(1)[:4]) == b"\x01\x02\x03\x04"
        other.close()
    finally:
        ring.close()
    found.add(
        "ok" if is_shared else "fault", "shared memory", "memfd ring works" if is_shared else "memfd ring is not shared"
    )
    data = bytes(CHECKED_BYTES)
    crc32c(data)
    started = time.perf_counter()
    crc32c(data)
    rate = CHECKED_BYTES / (time.perf_counter() - started) / 1e9
    slow = "" if rate > SLOW_GB_S else ": reading a store will be slow"
    found.add("note" if slow else "ok", "checksums", f"crc32c at {rate:.1f} GB/s{slow}")


def targets(found: Examination) -> None:
    from .extract.targets.hf import read_facts

    facts = read_facts("tiny", "auto")
    found.add(
        "ok", "tiny target", f"{facts.architecture}, {facts.num_layers} layers, weights {facts.weights_sha256[:12]}"
    )


def drafter(found: Examination) -> None:
    """Attention of the device in use: SDPA on a CPU, compiled flex_attention on CUDA."""
    import torch

    path = (
        "compiled flex_attention"
        if torch.cuda.is_available()
        else "SDPA with an explicit mask (flex_attention has no backward on a CPU)"
    )
    found.add("ok", "attention", path)
