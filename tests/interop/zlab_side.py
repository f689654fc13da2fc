"""Runs inside z-lab's own environment: loads our export with its classes and decodes.

Usage: python zlab_side.py EXPORT TARGET CASES.json RESULT.json
CASES holds prompts (lists of ids), max_new_tokens, stop ids, and one block: taps, ids, positions.
"""

import json
import sys
import time
from pathlib import Path

import torch
from dflash import model as zlab  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM


def main(export: str, target_folder: str, cases_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(cases_path).read_text())
    drafter, info = zlab.DFlashDraftModel.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    drafter.eval()
    target.eval()
    zlab._cuda_time = time.perf_counter  # its clock synchronises CUDA, which a CPU does not have
    decoded = []
    for prompt in cases["prompts"]:
        stats = zlab.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            max_new_tokens=cases["max_new_tokens"],
            stop_token_ids=cases["stop_ids"],
            return_stats=True,
        )
        decoded.append({"ids": stats.output_ids[0].tolist(), "cycles": stats.acceptance_lengths})
    with torch.no_grad():
        ids = torch.tensor([cases["block_ids"]])
        taps = torch.tensor([cases["taps"]])
        block = drafter(
            target_hidden=taps,
            noise_embedding=target.get_input_embeddings()(ids),
            position_ids=torch.arange(taps.shape[1] + ids.shape[1])[None],
        )
    result = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
        "num_parameters": sum(p.numel() for p in drafter.parameters()),
        "taps": list(drafter.target_layer_ids),
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "decoded": decoded,
        "block": block[0].tolist(),
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
