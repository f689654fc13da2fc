"""The folder that is served: given or made anew, and what differs between it and the run."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..export.check import differences
from ..export.config import SPECULATORS, ExportConfig
from ..export.export import export
from ..export.folders import read_config
from ..export.tensors import CONFIG_NAME
from ..facts import RunFacts
from .config import ServeCheckConfig


@dataclass(frozen=True, slots=True)
class ServedFolder:
    """A drafter's folder, its format and the number format of its weights."""

    path: Path
    layout: str
    dtype: str


def folder_differences(folder: Path, facts: RunFacts, state: Mapping[str, Tensor]) -> list[str]:
    """Each fact of the folder that is not the run's, with both values; `state` holds the run's weights in fp32.

    Where the target is, and under which name, is no fact of the drafter.
    """
    return [str(found) for found in differences(folder, facts, state) if "verifier.name_or_path" not in found.fact]


def prepared(run_dir: Path, step: int, config: ServeCheckConfig, target_path: str, scratch: Path) -> ServedFolder:
    """The folder of `config.export`, or a new export in `scratch`.

    A folder of speculators names its target itself; one that names another place than `target_path` is served as a copy
    in `scratch` that names this one.
    """
    if config.export is None:
        folder = scratch / "export"
        own = ExportConfig(out=str(folder), format=config.format, checkpoint=str(step), target=target_path)
        export(run_dir, own)
    else:
        folder = Path(config.export)
    content = read_config(folder)
    layout = "speculators" if content.get("speculators_model_type") else "zlab"
    if layout == SPECULATORS and content["speculators_config"]["verifier"]["name_or_path"] != target_path:
        content["speculators_config"]["verifier"]["name_or_path"] = target_path
        folder = Path(shutil.copytree(folder, scratch / "named"))
        (folder / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return ServedFolder(folder.absolute(), layout, str(content.get("dtype", "bfloat16")))
