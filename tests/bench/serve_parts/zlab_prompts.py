"""Runs inside an environment with z-lab's runtime: decodes prompts with an exported drafter.

Usage: python zlab_prompts.py TARGET FOLDER
FOLDER holds `export` and `cases.json` (prompts as token ids, max_new_tokens, stop_ids); `result.json` is written there:
for each prompt all ids, and the tokens that each cycle produced.
"""

import json
import sys
import time
from pathlib import Path

import torch
from dflash import model as zlab  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM


def main(target_path: str, folder_path: str) -> None:
    torch.set_num_threads(1)
    zlab._cuda_time = time.perf_counter  # its clock synchronises CUDA, which a CPU does not have
    folder = Path(folder_path)
    cases = json.loads((folder / "cases.json").read_text())
    drafter = zlab.DFlashDraftModel.from_pretrained(folder / "export", dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
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
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
