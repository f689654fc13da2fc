"""What the whole pipeline can learn by heart it drafts in whole blocks: the gate against a leak or a shift anywhere.

High accuracy in training with a short acceptance length in decoding is what a leak looks like (dflash-spec 7, 26).
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from dflash_offline.extract.targets.tasks import distinct_tasks
from dflash_offline.store.samples import SampleTable

pytestmark = pytest.mark.slow
NUM_SAMPLES, NEW_TOKENS = 32, 64
STEPS = 600
MOST_LOST = 2  # cycles; one of 10,000 slots of all anchors may stay wrong and costs a cycle, a leak costs a hundred
LAST_STEPS = 20  # five passes over the four rows of 32 samples


def dflash(folder: Path, *line: str) -> None:
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "dflash_offline.cli", *line]
    done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts.jsonl, the target's own answers to them (data) and its states (store)."""
    folder = tmp_path_factory.mktemp("overfit")
    tasks = distinct_tasks(NUM_SAMPLES, 3, held_out=False)
    chats = [{"messages": [{"role": "user", "content": task.prompt}], "split": "train"} for task in tasks]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    responses = ["--responses", "target", "--max-new-tokens", str(NEW_TOKENS), "--set", "min_trained=2"]
    dflash(folder, "prepare", "prompts.jsonl", "--target", "tiny", *responses, "--out", "data")
    dflash(folder, "extract", "--data", "data", "--store", "store")
    return folder


def best_cycles(data: Path, block_size: int) -> Counter[int]:
    """How many cycles of each length there are where every draft is right: whole blocks, then the rest of an answer."""
    counts: Counter[int] = Counter()
    for num_tokens in SampleTable(data).trained_tokens().tolist():
        whole, rest = divmod(num_tokens - 1, block_size)  # the first token comes with the prompt
        counts[block_size] += whole
        counts[rest] += rest > 0
    return counts


@pytest.mark.parametrize("block_size", [8, 10])
def test_32_samples_are_learned_by_heart_and_drafted_in_whole_blocks(recorded: Path, block_size: int) -> None:
    run = recorded / f"run-{block_size}"
    shape = ["--layers", "2", "--block-size", str(block_size), "--set", "rows.row_tokens=512"]
    dflash(recorded, "train", "--store", "store", "--out", run.name, *shape, "--steps", str(STEPS))
    dflash(recorded, "evaluate", run.name, "--prompts", "prompts.jsonl", "--max-new-tokens", str(NEW_TOKENS))

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["accuracy"] for line in lines if line["kind"] == "train"][-LAST_STEPS:]
    assert len(accuracies) == LAST_STEPS
    assert np.mean(accuracies) > 0.99
    exam = json.loads((run / "evaluation.json").read_text())
    assert exam["num_equal"] == exam["num_measured"] == NUM_SAMPLES
    best = best_cycles(recorded / "data", block_size)
    assert best[block_size] > 2 * NUM_SAMPLES
    assert exam["num_cycles"] - best.total() <= MOST_LOST
    assert exam["histogram"][-1] >= best[block_size] - MOST_LOST
