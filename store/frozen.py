"""The target's frozen parts beside the states: embedding, final norm, head, and its facts.

Training reads them from here and never loads the target. Only the functions import torch, so the
loader process may import this room without it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import UserError, system_reason
from .buffers import flat_bytes
from .checksum import crc32c
from .files import NewFile, disk_errors, is_abandoned, publish, remove, unreadable
from .manifest import ABSENT, LATER_FACTS, Manifest, checksum

if TYPE_CHECKING:
    import torch

TENSORS_PATH = "frozen/frozen.safetensors"
CONFIG_PATH = "frozen/config.json"
SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NAMES = ("embedding", "norm", "head")
PIECE_BYTES = 2**24  # read at once while checking


@dataclass(frozen=True, slots=True)
class Frozen:
    """embedding [V, H], norm [H], head [V, H]; a tied head is the embedding itself, not a copy."""

    embedding: "torch.Tensor"
    norm: "torch.Tensor"
    head: "torch.Tensor"
    config: dict[str, Any]
    is_tied: bool


def write_frozen(store_dir: Path, tensors: Mapping[str, "torch.Tensor"], config: Mapping[str, Any]) -> None:
    """Writes embedding, norm and, unless tied, head with the target's facts.

    Writing the same again changes nothing. Raises UserError where other parts are there already,
    ValueError for tensors that do not belong together. `frozen/config.json` comes last: where it
    is, the parts are whole.
    """
    require_parts(tensors)
    is_tied = "head" not in tensors
    arrays = {name: tensor_bytes(tensors[name]) for name in NAMES if name in tensors}
    facts = {
        name: {
            "dtype": str(tensors[name].dtype).removeprefix("torch."),
            "shape": list(tensors[name].shape),
            "crc32c": f"{crc32c(array):08x}",
        }
        for name, array in arrays.items()
    }
    document = json.loads(json.dumps({"config": dict(config), "is_tied": is_tied, "tensors": facts}))
    document["sha256"] = checksum(document)
    path = Path(store_dir) / CONFIG_PATH
    if path.exists():
        require_same_parts(path, read_document(path), document)
        return
    with disk_errors(path.parent):
        path.parent.mkdir(exist_ok=True)
    with NewFile(Path(store_dir) / TENSORS_PATH) as file:
        file.write(safetensors_header(facts))
        for array in arrays.values():
            file.write(array.data)
    publish(path, (json.dumps(document, indent=2) + "\n").encode())


def remove_unfinished(store_dir: Path, *, is_alone: bool) -> None:
    """Removes frozen parts that a killed worker left half written: up to gigabytes that nobody else would.

    Alone in the store all of them; else those of dead processes of this machine, as another launcher may write its own.
    """
    for path in (Path(store_dir) / CONFIG_PATH).parent.glob("*.tmp.*"):
        if is_alone or is_abandoned(path):
            remove(path)


def require_parts(tensors: Mapping[str, "torch.Tensor"]) -> None:
    if not {"embedding", "norm"} <= set(tensors) <= set(NAMES):
        raise ValueError(f"tensors are {sorted(tensors)}, expected embedding, norm and, unless tied, head")
    embedding, norm = tensors["embedding"], tensors["norm"]
    head = tensors.get("head", embedding)
    if embedding.ndim != 2 or head.shape[1:] != embedding.shape[1:] or norm.shape != embedding.shape[1:]:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(f"shapes are {shapes}, expected [V, H], [H], [V, H]")
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in SAFETENSORS_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, expected one of {', '.join(SAFETENSORS_NAMES)}")


def tensor_bytes(tensor: "torch.Tensor") -> np.ndarray:
    """The tensor's bytes in row order as a read-only array; a copy only where it is not on the CPU."""
    import torch

    return flat_bytes(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


def safetensors_header(facts: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The head of a safetensors file: its length (u64), then JSON padded with blanks to 8 bytes.

    Written by hand so that gigabytes of embedding stream out without a second copy in memory.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, fact in facts.items():
        size_bytes, dtype = fact_bytes(fact), SAFETENSORS_NAMES[fact["dtype"]]
        header[name] = {"dtype": dtype, "shape": fact["shape"], "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def fact_bytes(fact: Mapping[str, Any]) -> int:
    """Bytes of the tensor that a fact of config.json describes."""
    return math.prod(fact["shape"]) * (4 if fact["dtype"] == "float32" else 2)


def read_document(path: Path) -> dict[str, Any]:
    """The content of frozen/config.json; UserError where it is missing or no such document."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        expected = document.pop("sha256", None)
        if set(document) != {"config", "is_tied", "tensors"} or checksum(document) != expected:
            raise ValueError("its facts do not match their checksum")
        return document
    except FileNotFoundError as error:
        raise UserError(
            f"{str(path)!r} does not exist", "the target's frozen parts beside the states", "run the same extract again"
        ) from error
    except OSError as error:
        raise unreadable(error, path) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise damaged(path, str(error)) from error


def require_same_parts(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuses frozen parts other than those that are there."""
    for group in ("tensors", "config"):
        for name in sorted(set(old[group]) | set(new[group])):
            was, now = old[group].get(name, ABSENT), new[group].get(name, ABSENT)
            is_later = f"target.{name}" in LATER_FACTS and ABSENT in (was, now)
            if was != now and not is_later:
                raise UserError(
                    f"{str(path)!r} holds other parts: {name} = {json.dumps(was)} there, {json.dumps(now)} now",
                    "the target that the store was made with",
                    "give that target again, or choose another folder with --store",
                )


def read_frozen(store_dir: Path) -> Frozen:
    """The frozen parts on the CPU, checked against their checksums."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    document = read_document(Path(store_dir) / CONFIG_PATH)
    path = Path(store_dir) / TENSORS_PATH
    check_tensors(path, document["tensors"])
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise damaged(path, str(error)) from error
    head = tensors.get("head", tensors["embedding"])
    return Frozen(tensors["embedding"], tensors["norm"], head, document["config"], document["is_tied"])


def check_tensors(path: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError unless the file is, bit for bit, the tensors that config.json describes; needs no torch."""
    header = safetensors_header(facts)
    try:
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                raise damaged(path, "its header is not the one that config.json describes")
            for name, fact in facts.items():
                if f"{stream_crc32c(file, fact_bytes(fact)):08x}" != fact["crc32c"]:
                    raise damaged(path, f"{name} does not match its checksum in {CONFIG_PATH}")
            if file.read(1):
                raise damaged(path, "it goes on after its last tensor")
    except OSError as error:
        raise damaged(path, system_reason(error)) from error


def stream_crc32c(file: BufferedReader, size_bytes: int) -> int:
    """crc32c of the next bytes of a file, read piece by piece; of what is there where the file ends early."""
    crc, buffer = 0, np.empty(min(size_bytes, PIECE_BYTES), dtype=np.uint8)
    while size_bytes:
        count = file.readinto(buffer[:size_bytes].data)
        if not count:
            break
        crc = crc32c(buffer[:count], crc)
        size_bytes -= count
    return crc


def check_frozen(store_dir: Path, manifest: Manifest) -> None:
    """Raises UserError where the frozen parts are damaged, or not those of the target that the manifest names."""
    path = Path(store_dir) / CONFIG_PATH
    document = read_document(path)
    facts = document["tensors"]
    check_tensors(Path(store_dir) / TENSORS_PATH, facts)
    config, target = document["config"], manifest.target
    for name in sorted(set(config) | set(target)):
        was, now = target.get(name, ABSENT), config.get(name, ABSENT)
        if was != now:
            raise damaged(path, f"{name} = {json.dumps(now)}, the manifest's target has {json.dumps(was)}")
    width = facts["embedding"]["shape"][-1]
    if width != manifest.hidden_size:
        raise damaged(path, f"its embedding is {width} wide, the states are {manifest.hidden_size}")
    if "vocab_size" in target and facts["embedding"]["shape"][0] != target["vocab_size"]:
        raise damaged(path, f"its embedding has {facts['embedding']['shape'][0]} rows, not {target['vocab_size']}")
    if document["is_tied"] != ("head" not in facts):
        raise damaged(path, f"is_tied = {document['is_tied']}, but its tensors are {', '.join(facts)}")


def damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{str(path)!r} is damaged: {reason}".replace("\n", " "),
        "the frozen parts as they were written",
        f"delete {str(path.parent)!r} and run the same extract again, which writes them anew",
    )
