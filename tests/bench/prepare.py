"""How fast `prepare` turns chats into samples, against the bare tokenizer, and what memory it takes.

Writes chats of 1 to 8 turns out of Python's own manual texts and prepares them as the command line does:
    python tests/bench/prepare.py --dir DIR [--target smollm2] [--rows 20000] [--many 1000000]
The bare tokenizer encodes the same rendered texts, `encode_batch` of 256 at once, on one core, and does nothing else:
no JSON, no template, no mask, no file. Rates are of whole commands, their start included. Memory is the sum of the
proportional set sizes (PSS) of all processes, looked at ten times a second, over `--many` short chats.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from dflash_offline.extract.targets.facts import config_of, load_tokenizer, tokenizer_of
from dflash_offline.extract.targets.source import locate
from dflash_offline.store.samples import SampleTable

BATCH = 256
WATCH_S = 0.1
Row = tuple[str, float, str]


def sentences() -> list[str]:
    """Python's manual, cut at blank lines."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def chats(count: int, seed: int, most_turns: int, words: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Chats whose turns have between `words` words; every question is another one."""
    parts, draw = sentences(), random.Random(seed)
    for number in range(count):
        messages = []
        for turn in range(2 * draw.randint(1, most_turns)):
            wanted, said = draw.randint(*words), [f"{number}:{turn}"]
            while len(said) < wanted:
                said += draw.choice(parts).split(" ")
            messages.append({"role": ("user", "assistant")[turn % 2], "content": " ".join(said[:wanted])})
        yield {"messages": messages}


def write(path: Path, lines: Iterator[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def text_side(name: str, folder: Path) -> str:
    """Tokenizer, template and config of a target as files of their own: out of a GGUF file they take 9 s to read."""
    source = locate(name, weights=False)
    config_of(source).save_pretrained(folder)
    tokenizer_of(source).save_pretrained(folder)
    return str(folder)


def bare_s(source: Path, target: str) -> tuple[float, int]:
    """Seconds that the tokenizer takes for the rendered texts of the source, and how many tokens they are."""
    tokenizer = load_tokenizer(target)
    lines = (json.loads(line) for line in source.open(encoding="utf-8"))
    texts = [tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    backend = tokenizer.backend_tokenizer
    started, tokens = time.perf_counter(), 0
    for first in range(0, len(texts), BATCH):
        found = backend.encode_batch(texts[first : first + BATCH], add_special_tokens=False)
        tokens += sum(len(one.ids) for one in found)
    return time.perf_counter() - started, tokens


def tree_pss_mib(pid: int) -> float:
    """Of a process and all below it; what has ended meanwhile counts nothing."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return total / 1024 + sum(tree_pss_mib(int(child)) for child in children)


def prepare(source: Path, out: Path, target: str, processes: int) -> tuple[float, float]:
    """Seconds of the command, and its peak of memory in MiB."""
    line = ["prepare", str(source), "--target", target, "--out", str(out), "--set", f"processes={processes}"]
    command = [sys.executable, "-m", "dflash_offline.cli", *line, "--set", "min_trained=2"]
    started, peak = time.perf_counter(), 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None:
            peak = max(peak, tree_pss_mib(running.pid))
            time.sleep(WATCH_S)
        wall_s = time.perf_counter() - started
        if running.returncode:
            assert running.stderr is not None
            raise SystemExit(running.stderr.read())
    return wall_s, peak


def measure(args: argparse.Namespace) -> list[Row]:
    folder: Path = args.dir
    folder.mkdir(parents=True, exist_ok=True)
    source, target = (
        write(folder / "chats.jsonl", chats(args.rows, 0, 8, (50, 400))),
        text_side(args.target, folder / "t"),
    )
    bare, tokens = bare_s(source, target)
    one_s, _ = prepare(source, folder / "one", target, 1)
    two_s, _ = prepare(source, folder / "two", target, 2)
    made = SampleTable(folder / "one")
    num_tokens, same = (
        int(made.column("num_tokens").sum()),
        made.fingerprint() == SampleTable(folder / "two").fingerprint(),
    )
    assert same, "one process and two made different samples"
    rows: list[Row] = [
        ("vs_bare_tokenizer", (num_tokens / one_s) / (tokens / bare), "ratio"),
        ("scaling_2_processes", one_s / two_s, "ratio"),
        ("rows_per_s", args.rows / one_s, "rows/s"),
        ("rows_per_s_2_processes", args.rows / two_s, "rows/s"),
        ("tokens_per_s", num_tokens / one_s, "tokens/s"),
        ("bare_tokenizer_tokens_per_s", tokens / bare, "tokens/s"),
        ("tokens_per_row", num_tokens / args.rows, "tokens"),
    ]
    for name, count in (("peak_rss_mib", args.many), ("peak_rss_mib_of_a_tenth", args.many // 10)):
        many = write(folder / "many.jsonl", chats(count, 1, 1, (8, 40)))
        wall_s, peak = prepare(many, folder / name, target, 2)
        rows.append((name, peak, "MiB"))
        if name == "peak_rss_mib":
            rows += [("many_rows", count, "count"), ("many_rows_per_s", count / wall_s, "rows/s")]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="empty folder for everything")
    parser.add_argument("--target", default="smollm2", help="whose tokenizer and template; tiny needs no package")
    parser.add_argument("--rows", type=int, default=20_000, help="chats whose rate is measured")
    parser.add_argument("--many", type=int, default=1_000_000, help="short chats whose memory is measured")
    rows = measure(parser.parse_args())
    for name, value, unit in rows:
        print(f"{name:28} {value:14,.3f} {unit}")
    print(json.dumps({"bench": "prepare", "rows": [{"name": n, "value": round(v, 4), "unit": u} for n, v, u in rows]}))


if __name__ == "__main__":
    main()
