"""`dflash sweep` as a user types it, and the stores that it is measured on."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_offline.demo import SMOLLM2_MASK, DemoConfig, command_lines, write_prompts
from dflash_offline.store.manifest import read_manifest

TINY_PROMPTS, TINY_EXAM = 64, 8
LOOK_S = 0.1  # between two looks at a command that runs


def dflash(line: Sequence[str], look: Callable[[], None] = lambda: None) -> int:
    """Runs a command to its end and gives its exit code; `look` is called a few times a second."""
    print(f"$ dflash {' '.join(line)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "dflash_offline.cli", *line])
    try:
        while True:
            look()
            try:
                return process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def sweep(
    folder: Path,
    store: Path,
    devices: Sequence[str],
    fields: Mapping[str, Sequence[Any]],
    base: Mapping[str, Any],
    look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The content of sweep.json after the command; FOLDER.toml is its config file. Goes on with a sweep that is there.

    Raises SystemExit where the command fails.
    """
    tables = {"sweep.fields": fields, "train": base}
    lines = [line for name, values in tables.items() for line in (f"[{name}]", *map(toml_line, values.items()))]
    file = folder.with_suffix(".toml")
    file.write_text("\n".join([*lines, ""]))
    options = ["--store", str(store), "--out", str(folder), "--devices", ",".join(devices)]
    code = dflash(["sweep", "--config", str(file), *options], look)
    if code:
        raise SystemExit(f"dflash sweep: exit code {code}")
    return json.loads((folder / "sweep.json").read_text())


def toml_line(entry: tuple[str, Any]) -> str:
    """`name = value`; numbers, texts and lists of them are written alike in JSON and TOML."""
    return f"{entry[0]} = {json.dumps(entry[1])}"


def own_settings(store: Path) -> dict[str, Any]:
    """What a drafter on this store must be told: SmolLM2 has no mask token of its own."""
    is_smollm2 = "smollm2" in read_manifest(store).target["name"].lower()
    return {"drafter.mask_token_id": SMOLLM2_MASK} if is_smollm2 else {}


def tiny_store(out: Path) -> Path:
    """A small store of the packaged target, made by the demo's own commands."""
    config = DemoConfig(out=str(out), prompts=TINY_PROMPTS, exam=TINY_EXAM, shards=1)
    write_prompts(out, config)
    for line in command_lines(out, config):
        if line[0] in ("prepare", "extract") and dflash(line):
            raise SystemExit(f"dflash {line[0]} failed")
    return out / "store"


def smollm2_store(out: Path, device: str, prompts: int) -> Path:
    """SmolLM2's store, by the commands of its own benchmark; they go on where they were."""
    script = Path(__file__).parents[1] / "smollm2_drafter.py"
    line = ["--out", str(out), "--device", device, "--prompts", str(prompts), "--until", "extract"]
    subprocess.run([sys.executable, str(script), *line], check=True)
    return out / "store"
