"""On what a run runs: versions, device, ranks and the plan of its memory, kept in RUN for reports.

Rank 0 writes it at every start of the run, so it tells of the newest. Decides nothing; knows no torch by itself.
"""

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from .. import __version__
from ..store.files import publish
from .memory_choice import Choice, room_bytes

ENVIRONMENT_NAME = "environment.json"
PACKAGES = ("torch", "numpy", "zarr", "pyarrow", "triton")


def write_environment(run_dir: Path, **device: Any) -> None:
    """Publishes RUN/environment.json: versions, and what is told of the device."""
    found = {"versions": versions(), **device}
    publish(run_dir / ENVIRONMENT_NAME, (json.dumps(found, indent=1) + "\n").encode())


def versions() -> dict[str, str]:
    """Of Python, of this package, and of those that its numbers depend on; what is not installed is left out."""
    found = {"python": platform.python_version(), "dflash-offline": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plan_facts(choice: Choice | None) -> dict[str, Any] | None:
    """The predicted memory in bytes, part by part; None on a CPU, where nothing is planned."""
    if choice is None:
        return None
    plan = choice.plan
    return {
        "card_bytes": choice.card_bytes,
        "room_bytes": room_bytes(choice.card_bytes),
        "peak_bytes": plan.peak_bytes,
        "largest": plan.largest.name,
        "has_graph": choice.has_graph,
        "is_checkpointed": choice.is_checkpointed,
        "chunk_blocks": choice.chunk_blocks,
        "parts": [
            {"name": part.name, "size_bytes": part.size_bytes, "grows_with": part.grows_with}
            for part in (*plan.held, *plan.largest.parts)
        ],
    }
