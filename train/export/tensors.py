"""The tensors of a drafter as every served format names them: names, shapes, dtypes, and the files that hold them.

SGLang skips tensor names that it does not know without a word, so names and shapes are checked in both directions
(dflash-spec 1.2). Knows files and specs; no config and no run.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ... import UserError
from ..spec import DrafterSpec

CONFIG_NAME, TENSORS_NAME, INDEX_NAME = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = ("float32", "bfloat16", "float16")
SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SHOWN_NAMES = 4
OF_TORCHSPEC = ("context_proj.weight", "context_norm.weight", "final_norm.weight")
Shapes = Mapping[str, tuple[int, ...]]


def tensor_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of all 11 * L + 3 tensors (dflash-spec 1.2)."""
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * width, spec.num_kv_heads * width
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, spec.num_taps * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return shapes | {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}


def num_parameters(spec: DrafterSpec) -> int:
    """Trained numbers of a drafter, by the formula of dflash-spec 1.6."""
    hidden, width = spec.hidden_size, spec.head_dim
    attention = 2 * hidden * spec.num_heads * width + 2 * hidden * spec.num_kv_heads * width + 2 * width
    layer = attention + 3 * hidden * spec.intermediate_size + 2 * hidden
    return spec.num_layers * layer + spec.num_taps * hidden**2 + 2 * hidden


def target_copies(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Parts of the target that older speculators folders hold a frozen copy of; engines share the target's own."""
    table = (spec.vocab_size, spec.hidden_size)
    names = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
    return {**dict.fromkeys(names, table), "verifier_norm.weight": (spec.hidden_size,)}


@contextmanager
def told_by(folder: Path) -> Iterator[None]:
    """Turns what reading the folder raises into a UserError that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        happened = f"{str(folder)!r} cannot be read: {type(error).__name__}: {error}".replace("\n", " ")
        expected = f"a folder with {CONFIG_NAME} and {TENSORS_NAME}, whole and unchanged"
        raise UserError(happened, expected, "copy or download it again, or export again") from error


def tensor_files(folder: Path) -> list[Path]:
    """The files with the tensors: `model.safetensors`, or the shards that its index names, in their order."""
    index = folder / INDEX_NAME
    if (folder / TENSORS_NAME).is_file() or not index.is_file():
        return [folder / TENSORS_NAME]
    files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    for tensor, name in files.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{INDEX_NAME} has {tensor} in {name!r}, which is no file of this folder")
    return [folder / name for name in sorted(set(files.values()))]


def read_headers(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes and dtypes by tensor name, from the headers of the files. Raises UserError where one cannot be read.

    A dtype that no drafter has keeps safetensors' own word for it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    with told_by(folder):
        for path in tensor_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in shapes:
                        raise ValueError(f"{name} is in two files")
                    part = file.get_slice(name)
                    shapes[name] = tuple(part.get_shape())
                    dtype = str(part.get_dtype())
                    dtypes[name] = SAFETENSORS_DTYPES.get(dtype, dtype)
    return shapes, dtypes


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, on the CPU, in their own dtype. Raises UserError where a file cannot be read."""
    with told_by(folder):
        return {name: tensor for path in tensor_files(folder) for name, tensor in load_file(path).items()}


def tensors_sha256(folder: Path) -> str:
    """sha256 of the one tensor file, or over those of all shards."""
    with told_by(folder):
        found = [file_sha256(path) for path in tensor_files(folder)]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_tensors(
    folder: Path, spec: DrafterSpec, found: Shapes, dtypes: Mapping[str, str], allowed: Shapes | None = None
) -> None:
    """Raises UserError unless names and shapes are exactly those of the spec, all in one dtype that a drafter has.

    `allowed` tensors may be there too, in the shape given.
    """
    wanted, allowed = tensor_shapes(spec), allowed or {}
    if foreign := [name for name in OF_TORCHSPEC if name in found]:
        raise UserError(
            f"the tensors of {str(folder)!r} have TorchSpec's names, like {foreign[0]}",
            "z-lab's names (fc.weight, hidden_norm.weight, norm.weight, layers.N...)",
            "convert the checkpoint with TorchSpec's own script first",
        )
    both = {**allowed, **wanted}
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is unknown" for name in found if name not in both]
    faults += [f"{n} has shape {found[n]}, not {s}" for n, s in both.items() if n in found and found[n] != s]
    faults += dtype_faults({name: dtypes[name] for name in wanted if name in dtypes})
    if faults:
        more = f" and {len(faults) - SHOWN_NAMES} more" if len(faults) > SHOWN_NAMES else ""
        raise UserError(
            f"the tensors of {str(folder)!r} do not fit its config: {'; '.join(faults[:SHOWN_NAMES])}{more}",
            f"the {len(wanted)} tensors of a drafter with {spec.num_layers} layers and {spec.num_taps} taps, in one "
            f"of {', '.join(DTYPES)}",
            "copy or download the folder again, or export again",
        )


def dtype_faults(dtypes: Mapping[str, str]) -> list[str]:
    """A line for each tensor whose dtype is none of a drafter, or not that of most others."""
    counts: dict[str, int] = {}
    for dtype in dtypes.values():
        counts[dtype] = counts.get(dtype, 0) + 1
    usual = max(counts, key=lambda dtype: counts[dtype], default="")
    wrong: dict[str, Any] = {n: d for n, d in dtypes.items() if d != usual or d not in DTYPES}
    return [f"{name} is {dtype}, others are {usual}" for name, dtype in wrong.items()]


def require_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError for weights that are NaN or infinite: a drafter that diverged, or that its dtype cannot hold."""
    faults = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if faults:
        raise UserError(
            f"{len(faults)} of {len(tensors)} tensors of {str(folder)!r} are not finite, like {faults[0]}",
            "finite weights, in a number format that holds them",
            "take another checkpoint or copy, or with float16 another --set dtype",
        )
