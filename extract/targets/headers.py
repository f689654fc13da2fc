"""What the headers of a target's safetensors files say, held against its config before anything is laid out.

Knows the format (length u64, JSON, data); reads no tensor and imports neither torch nor transformers.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import UserError
from .source import Source

PLAIN_DTYPES = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
"""Floating numbers that are read as they stand, in the words of safetensors and of torch."""
MASK_DTYPES = {"BOOL", "U8", "bool", "uint8"}
MASKS = ("bias", "masked_bias")  # causal masks that old checkpoints hold as buffers of these names
HARMLESS = re.compile(r"inv_freq$|[kv]_scale$|[kv]_proj\.output_scale$")
"""Rotary frequencies, which every model computes itself, and the scales of a quantized cache, which none here has."""
TABLES = ("position_ids", "token_type_ids", "relative_position_index", "num_batches_tracked", "tid2eid")
"""Buffers that are whole numbers by nature: positions, counters, DeepSeek-V4's experts by token."""
Stored = dict[str, tuple[str, tuple[int, ...]]]
MATRICES = re.compile(r"(?:(?:model|language_model)\.)*(?:embed_tokens|lm_head)\.weight")


def check_tensor_files(source: Source, files: Sequence[Path]) -> None:
    """Raises UserError for a safetensors file that is shorter or longer than its header says, or has none."""
    for path in files:
        if path.suffix != ".safetensors":
            continue
        size, expected = path.stat().st_size, expected_bytes(path)
        if size != expected:
            is_known = "a readable header" if expected is None else f"{expected:,} bytes by its header"
            raise UserError(
                f"target {source.name!r}: {path.name} is damaged, it has {size:,} bytes",
                is_known,
                "copy or download that file again",
            )


def expected_bytes(path: Path) -> int | None:
    """The size of a safetensors file by its own header; None without a sound one."""
    found = read_header(path)
    if found is None:
        return None
    length, entries = found
    return 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)


def read_header(path: Path) -> tuple[int, dict[str, dict[str, Any]]] | None:
    """The header's length in bytes and its entries by tensor, each with dtype, shape and data_offsets."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= path.stat().st_size - 8:
            return None
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for entry in entries.values():
                _ = str(entry["dtype"]), list(entry["shape"]), 0 + entry["data_offsets"][1]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return None
    return length, entries


def stored_tensors(files: Sequence[Path]) -> dict[Path, Stored]:
    """Number format and shape of every tensor of each sound safetensors file."""
    found: dict[Path, Stored] = {}
    for path in files:
        if path.suffix == ".safetensors" and (header := read_header(path)) is not None:
            found[path] = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header[1].items()}
    return found


def require_one_place(source: Source, held: Mapping[Path, Iterable[str]], placed: Mapping[str, Path] | None) -> None:
    """Refuses a tensor that two files hold, and files that hold other tensors than the index says.

    `held` are the tensors of every file, `placed` the file of each tensor by the index. transformers reads all
    tensors of the index's files and keeps the last of two: what is loaded would hang on the order of the files.
    """
    found: dict[str, Path] = {}
    for path, names in held.items():
        for name in names:
            if name in found:
                raise UserError(
                    f"target {source.name!r}: its weights hold {name!r} twice, in {found[name].name} and {path.name}",
                    "each tensor in one file",
                    "copy or download the tensor files and their index again, into an empty folder",
                )
            found[name] = path
    if placed is None:
        return
    for name in sorted({*found, *placed}):
        said, place = placed.get(name), found.get(name)
        if said != place and not HARMLESS.search(name):
            raise UserError(
                f"target {source.name!r}: {name!r} lies in {place.name if place else 'no file'}, and by the index in "
                f"{said.name if said else 'none'}",
                "tensor files with the index that was written for them",
                "copy or download the tensor files and their index again, into an empty folder",
            )


def require_plain_numbers(source: Source, formats: Iterable[tuple[str, str]]) -> None:
    """Refuses pairs (tensor, number format) of anything but floating numbers, where no quantization_config has them.

    transformers would cast packed and whole numbers to floating ones and leave their scales out. Masks and tables
    that are no weights pass.
    """
    packed = [(name, kind) for name, kind in formats if kind not in PLAIN_DTYPES and not is_buffer(name, kind)]
    if packed:
        name, kind = packed[0]
        raise UserError(
            f"target {source.name!r}: its weights hold {name!r} as {kind} ({len(packed)} such tensors), "
            "and its config.json has no quantization_config",
            "weights in float32, bfloat16 or float16, or a quantization_config that says how they are packed",
            "copy the config.json that belongs to these weights, or record the weights before quantization",
        )


def is_buffer(name: str, kind: str) -> bool:
    own = name.rpartition(".")[2]
    return own in TABLES or (own in MASKS and kind in MASK_DTYPES)


def require_matrix_shapes(source: Source, stored: Stored, shape: tuple[int, int]) -> None:
    """Refuses an embedding or a head of another shape than [V, H] of the config: cheap, and before a store is made.

    A tied head that is there all the same counts, too: transformers compares it with the embedding. Other tensors are
    compared when they are loaded: their names and layouts differ by family.
    """
    for name, (_, found) in sorted(stored.items()):
        if MATRICES.fullmatch(name) and found != shape:
            raise wrong_shape(source, name, 1, f": it is {list(found)}, config.json says {list(shape)}")


def wrong_shape(source: Source, name: str, count: int, shapes: str = "") -> UserError:
    """The error for a parameter that the tensor files leave unset."""
    return UserError(
        f"target {source.name!r}: its weights hold no {name!r} of the right shape ({count} such tensors){shapes}",
        "every parameter of the model in the tensor files (a tied head may be absent)",
        "check the sizes and tie_word_embeddings in config.json, or copy the missing files",
    )
