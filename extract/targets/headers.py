"""What the headers of a target's safetensors files say, held against its config before anything is laid out.

Knows the format (length u64, JSON, data); reads no tensor and imports neither torch nor transformers.
"""

import json
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ... import UserError
from .source import Source

PACKED_DTYPES = re.compile(r"[IU]8|F8_\w+|F4\w*|u?int8|float8_\w+|float4_\w+")
"""One byte or less a number, in the words of safetensors and of torch."""
MASKS = ("bias", "masked_bias")  # causal masks of 1 byte that old checkpoints hold as buffers of these names
Stored = dict[str, tuple[str, tuple[int, ...]]]
MATRICES = re.compile(r"(?:(?:model|language_model)\.)*(embed_tokens|lm_head)\.weight")


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


def stored_tensors(files: Sequence[Path]) -> Stored:
    """Number format and shape of every tensor in sound safetensors files."""
    found: Stored = {}
    for path in files:
        if path.suffix == ".safetensors" and (header := read_header(path)) is not None:
            found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header[1].items()}
    return found


def require_plain_numbers(source: Source, formats: Iterable[tuple[str, str]]) -> None:
    """Refuses pairs (tensor, number format) of packed numbers, for weights that no quantization_config describes.

    transformers would cast them to floating numbers and leave their scales out.
    """
    packed = [
        (name, kind) for name, kind in formats if PACKED_DTYPES.fullmatch(kind) and name.rpartition(".")[2] not in MASKS
    ]
    if packed:
        name, kind = packed[0]
        raise UserError(
            f"target {source.name!r}: its weights hold {name!r} as {kind} ({len(packed)} such tensors), "
            "and its config.json has no quantization_config",
            "weights in float32, bfloat16 or float16, or a quantization_config that says how they are packed",
            "copy the config.json that belongs to these weights, or record the weights before quantization",
        )


def require_matrix_shapes(source: Source, stored: Stored, shape: tuple[int, int], *, is_tied: bool) -> None:
    """Refuses an embedding or a head of another shape than [V, H] of the config: cheap, and before a store is made.

    Other tensors are compared when they are loaded: their names and layouts differ by family.
    """
    for name, (_, found) in sorted(stored.items()):
        match = MATRICES.fullmatch(name)
        if match and found != shape and not (is_tied and match[1] == "lm_head"):
            raise wrong_shape(source, name, 1, f": it is {list(found)}, config.json says {list(shape)}")


def wrong_shape(source: Source, name: str, count: int, shapes: str = "") -> UserError:
    """The error for a parameter that the tensor files leave unset."""
    return UserError(
        f"target {source.name!r}: its weights hold no {name!r} of the right shape ({count} such tensors){shapes}",
        "every parameter of the model in the tensor files (a tied head may be absent)",
        "check the sizes and tie_word_embeddings in config.json, or copy the missing files",
    )
