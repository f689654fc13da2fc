"""Weights that are not those of their config: refused, never read in part or as other numbers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.facts import read_facts
from dflash_offline.extract.targets.hf import load_target
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def edited(family_folder: Any, tmp_path: Path) -> Callable[..., str]:
    """edited("llama", edit, num_hidden_layers=3): a copy whose tensors `edit` changed, and whose config differs so."""

    def make(family: str, edit: Callable[[Tensors], Any] = bool, **config: Any) -> str:
        folder = shutil.copytree(family_folder(family), tmp_path / "t")
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(content))
        return str(folder)

    return make


def refused(says: str, read: Any, folder: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read(folder)
    assert len(str(caught.value).splitlines()) == 3


def each_projection(suffix: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors |= {key.removesuffix(".weight") + suffix: tensor.clone() for key in tensors if "q_proj.weight" in key}

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (each_projection(".weight_scale_inv", torch.ones(1, 1)), r"0.self_attn.q_proj.weight_scale_inv' \(4 such"),
        (each_projection(".bias", torch.ones(64)), r"'model.layers.0.self_attn.q_proj.bias' \(4 such tensors\)"),
        (lambda tensors: tensors.update({"lm_head.bias": torch.ones(262)}), r"'lm_head.bias' \(1 such"),
        (lambda tensors: tensors.update({"model.norm.bias": torch.ones(64)}), "'model.norm.bias'"),
        (lambda tensors: tensors.update({"model.embed_tokens.scale": torch.ones(1)}), "'model.embed_tokens.scale'"),
    ],
)
def test_a_tensor_that_the_decoder_does_not_take(edited: Any, edit: Any, says: str) -> None:
    refused(says, load_target, edited("llama", edit))


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3-vl-wrapper", "model.language_model"), ("gemma3-wrapper", "model.language_model"), ("nemotron-h", "")],
)
def test_the_names_of_a_family_are_known(edited: Any, family: str, name: str) -> None:
    """Of a decoder inside a multimodal model, and of an adapter's."""

    def edit(tensors: Tensors) -> None:
        place = next(key for key in tensors if "layers.1." in key and "vision" not in key and "visual" not in key)
        tensors[place.partition("layers.1.")[0] + "layers.1.own.scale"] = torch.ones(1)

    refused(r"layers\.1\.own\.scale' \(1 such", load_target, edited(family, edit))


def test_a_layer_more_than_the_config_says(edited: Any) -> None:
    refused(r"'model.layers.3.\w+.weight' \(9 such tensors\)", load_target, edited("llama", num_hidden_layers=3))


def test_parts_beside_the_decoder_are_left_out(edited: Any) -> None:
    """A layer that predicts a further token (DeepSeek's numbering and Qwen's), vision, scales of a quantized cache."""
    names = ("model.layers.4.eh_proj.weight", "model.layers.4.embed_tokens.weight", "mtp.layers.0.fc.weight")
    names += ("model.visual.layers.0.fc.weight", "vision_tower.norm.weight", "model.layers.1.self_attn.k_scale")
    more = {name: torch.ones(2, 2) for name in names}
    folder = edited("llama", lambda tensors: tensors.update(more), num_nextn_predict_layers=1)
    assert load_target(folder).facts.num_layers == 4


PACKED = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE = [torch.bool, torch.int16, torch.int32, torch.int64, torch.complex64]


@pytest.mark.parametrize("kind", [*PACKED, *WHOLE])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_packed_numbers_without_a_quantization_config(edited: Any, kind: torch.dtype, suffix: str) -> None:
    """They would be cast, without their scales."""

    def edit(tensors: Tensors) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"].to(kind)

    folder = edited("llama", edit)
    says = r"'model.layers.2.mlp.up_proj.weight' as \w+ \(1 such tensors\), and its config.json has no"
    if suffix == "bin":
        path = Path(folder) / "model.safetensors"
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()
    else:
        refused(says, read_facts, folder)
    refused(says, load_target, folder)


def test_masks_and_tables_are_no_weights(edited: Any) -> None:
    kinds = {"model.layers.1.self_attn.bias": torch.bool, "model.layers.1.self_attn.masked_bias": torch.uint8}
    kinds |= {"vision_tower.embeddings.position_ids": torch.int64, "vision_tower.bn.num_batches_tracked": torch.int64}
    folder = edited("llama", lambda tensors: tensors.update({n: torch.ones(1).to(k) for n, k in kinds.items()}))
    assert read_facts(folder).num_layers == 4


def test_a_tied_head_of_another_shape(edited: Any) -> None:
    """transformers compares it with the embedding, on no device."""
    folder = edited("llama-tied", lambda tensors: tensors.update({"lm_head.weight": torch.ones(300, 64)}))
    says = r"'lm_head.weight' .*it is \[300, 64\], config.json says \[262, 64\]"
    refused(says, read_facts, folder)
    refused(says, load_target, folder)


@pytest.fixture
def two_files(family_folder: Any, tmp_path: Path) -> Callable[..., str]:
    """two_files("bin", edit): llama in two files, whose tensors and index `edit(first, second, index)` changed."""

    def make(suffix: str, edit: Callable[[Tensors, Tensors, dict[str, str]], Any]) -> str:
        folder = shutil.copytree(family_folder("llama"), tmp_path / "t")
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = [{name: tensors[name] for name in names[:15]}, {name: tensors[name] for name in names[15:]}]
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        files = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
        index = {name: file for part, file in zip(parts, files) for name in part}
        edit(parts[0], parts[1], index)
        for part, file in zip(parts, files):
            if suffix == "bin":
                torch.save(part, folder / file)
            else:
                save_file({name: tensor.clone() for name, tensor in part.items()}, folder / file, {"format": "pt"})
        content = {"metadata": {}, "weight_map": index}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(content))
        return str(folder)

    return make


NORM, HEAD = "model.norm.weight", "lm_head.weight"  # of the second file and of the first


def stale_copy_in_front(first: Tensors, second: Tensors, index: dict[str, str]) -> None:
    first[NORM] = 3 * second[NORM]


def stale_copy_behind(first: Tensors, second: Tensors, index: dict[str, str]) -> None:
    second[HEAD] = 3 * first[HEAD]


def swapped(first: Tensors, second: Tensors, index: dict[str, str]) -> None:
    index[HEAD], index[NORM] = index[NORM], index[HEAD]


def left_out(first: Tensors, second: Tensors, index: dict[str, str]) -> None:
    del index[NORM]


def named_in_vain(first: Tensors, second: Tensors, index: dict[str, str]) -> None:
    index["model.layers.9.x.weight"] = index[HEAD]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (stale_copy_in_front, rf"hold '{NORM}' twice, in \S+-00001-of-00002.\w+ and \S+-00002-of-00002"),
        (stale_copy_behind, rf"hold '{HEAD}' twice, in \S+-00001-of-00002.\w+ and \S+-00002-of-00002"),
        (swapped, rf"'{HEAD}' lies in \S+-00001-of-00002.\w+, and by the index in \S+-00002-of-00002"),
        (left_out, rf"'{NORM}' lies in \S+-00002-of-00002.\w+, and by the index in none"),
        (named_in_vain, r"'model.layers.9.x.weight' lies in no file, and by the index in \S+-00001-of-00002"),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_tensors_that_do_not_lie_where_the_index_says(two_files: Any, suffix: str, edit: Any, says: str) -> None:
    """transformers reads all tensors of all files, and keeps the last of two."""
    folder = two_files(suffix, edit)
    if suffix == "safetensors":
        refused(says, read_facts, folder)
    refused(says, load_target, folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_rotary_frequencies_may_be_missing_in_an_index(two_files: Any, suffix: str) -> None:
    def edit(first: Tensors, second: Tensors, index: dict[str, str]) -> None:
        first["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert load_target(two_files(suffix, edit)).facts.num_layers == 4


@pytest.mark.parametrize("content", [[1], torch.ones(3), None])
def test_a_file_of_torch_save_that_holds_no_dict(edited: Any, content: Any) -> None:
    path = Path(edited("llama")) / "model.safetensors"
    path.unlink()
    torch.save(content, path.with_name("pytorch_model.bin"))
    refused(r"pytorch_model.bin holds a \w+", load_target, str(path.parent))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_named(edited: Any, name: str, value: float) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    target = load_target(edited("llama", edit))
    with pytest.raises(UserError, match=f"its weights hold NaN or infinity, first in '{name}'") as caught:
        target.frozen()
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vocab_size": 200}, r"'lm_head.weight' .*it is \[262, 64\], config.json says \[200, 64\]"),
        ({"hidden_size": 128}, r"'lm_head.weight' .*it is \[262, 64\], config.json says \[262, 128\]"),
    ],
)
def test_a_vocabulary_of_another_size_is_seen_before_anything_is_loaded(
    edited: Any, config: dict[str, Any], says: str
) -> None:
    folder = edited("llama", **config)
    refused(says, read_facts, folder)
    refused(says, load_target, folder)


@pytest.mark.parametrize("config", [{"intermediate_size": 100}, {"num_key_value_heads": 4}])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_other_shapes_are_refused_when_they_are_loaded(edited: Any, family: str, config: dict[str, Any]) -> None:
    refused(
        r"hold no 'model.layers.0.\S+' of the right shape \(\d+ such tensors\): it is \[",
        load_target,
        edited(family, **config),
    )
