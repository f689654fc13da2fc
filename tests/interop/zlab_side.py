"""Runs inside z-lab's own environment: loads, runs, builds and saves drafters with its classes.

Usage: python zlab_side.py TARGET FOLDER
FOLDER holds `export` (ours), others of ours that cases.json names in exports, and `cases.json`: prompts (lists of ids),
max_new_tokens, stop_ids; sampled (temperature, repeats, max_new_tokens); one block of taps [S, Lt*H] and block_ids [B];
and built, the drafters to make here: name -> config, seed, taps, block [B, H].
Written there: `again` (our export, saved by their class), one folder for each name of built, and `result.json`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from dflash import model as zlab  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, Qwen3Config

LOWEST, HIGHEST = (5, 15), (5, 19)  # of transformers, see conftest.py


def main(target_path: str, folder_path: str) -> None:
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if not LOWEST <= version <= HIGHEST:
        raise SystemExit(f"transformers {transformers.__version__} is outside {LOWEST} to {HIGHEST}")
    torch.set_num_threads(1)
    folder = Path(folder_path)
    cases = json.loads((folder / "cases.json").read_text())
    drafter, info = zlab.DFlashDraftModel.from_pretrained(
        folder / "export", dtype=torch.float32, output_loading_info=True
    )
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
    drafter.eval()
    target.eval()
    drafter.save_pretrained(folder / "again")
    with torch.no_grad():
        noise = target.get_input_embeddings()(torch.tensor(cases["block_ids"]))  # [B, H]
    result = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
        "num_parameters": sum(p.numel() for p in drafter.parameters()),
        "taps": list(drafter.target_layer_ids),
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "decoded": decoded(drafter, target, cases),
        "sampled": sampled(drafter, target, cases["prompts"], **cases["sampled"]),
        "block": block_output(drafter, torch.tensor(cases["taps"]), noise),
        "exports": {name: exported(folder / name, torch.tensor(cases["taps"]), noise) for name in cases["exports"]},
        "built": {name: built(folder / name, **facts) for name, facts in cases["built"].items()},
    }
    (folder / "result.json").write_text(json.dumps(result))


def decoded(drafter: Any, target: Any, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Their decoding loop on every prompt: all ids, and the tokens that each cycle produced."""
    zlab._cuda_time = time.perf_counter  # its clock synchronises CUDA, which a CPU does not have
    found = []
    for prompt in cases["prompts"]:
        stats = zlab.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            max_new_tokens=cases["max_new_tokens"],
            stop_token_ids=cases["stop_ids"],
            return_stats=True,
        )
        found.append({"ids": stats.output_ids[0].tolist(), "cycles": stats.acceptance_lengths})
    return found


def sampled(
    drafter: Any, target: Any, prompts: list[list[int]], temperature: float, repeats: int, max_new_tokens: int
) -> list[list[dict[str, list[int]]]]:
    """Their sampled answers to every prompt, so many of each, ended by the token limit alone: new ids and cycles."""
    torch.manual_seed(0)

    def answer(prompt: list[int]) -> dict[str, list[int]]:
        stats = zlab.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            max_new_tokens=max_new_tokens,
            stop_token_ids=None,
            temperature=temperature,
            return_stats=True,
        )
        return {"ids": stats.output_ids[0, len(prompt) :].tolist(), "cycles": stats.acceptance_lengths}

    return [[answer(prompt) for _ in range(repeats)] for prompt in prompts]


@torch.no_grad()
def block_output(drafter: Any, taps: torch.Tensor, noise: torch.Tensor) -> list[list[float]]:
    """Their output [B, H] for the block `noise` [B, H] right behind a context of `taps` [S, Lt*H]."""
    positions = torch.arange(len(taps) + len(noise))[None]
    return drafter(target_hidden=taps[None], noise_embedding=noise[None], position_ids=positions)[0].tolist()


def exported(folder: Path, taps: torch.Tensor, noise: torch.Tensor) -> list[list[float]]:
    """Their output for the same block by another export of ours."""
    drafter = zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    return block_output(drafter, taps, noise)


def built(folder: Path, config: dict[str, Any], seed: int, taps: Any, block: Any) -> list[list[float]]:
    """Makes a drafter of their class with random weights, saves it, gives its output for one block."""
    torch.manual_seed(seed)
    drafter = zlab.DFlashDraftModel(Qwen3Config(**config)).float().eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))  # norms that are all ones would not be told apart
    drafter.save_pretrained(folder)
    return block_output(drafter, torch.tensor(taps), torch.tensor(block))


if __name__ == "__main__":
    main(*sys.argv[1:])
