"""The demo as a newcomer types it: short in the fast suite, whole in the slow one."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.demo import DemoConfig, demo

MEBIBYTE = 2**20


def memory_of_tree(pid: int) -> int:
    """Proportional set size of a process and all its descendants, bytes; shared pages count once."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        try:
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        total += int(found.group(1)) * 1024 if found else 0
    return total


def run_demo(out: Path, *options: str) -> tuple[list[str], int, float]:
    """Output lines, peak memory in bytes, seconds."""
    started, peak, is_over = time.monotonic(), [0], threading.Event()
    log = out.parent / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_offline.cli", "demo", "--out", str(out), *options],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
        )

        def watch() -> None:
            while not is_over.wait(0.5):
                peak[0] = max(peak[0], memory_of_tree(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait(timeout=1200)
        is_over.set()
        watcher.join()
    text = log.read_text(errors="replace")
    assert code == 0, text[-4000:]
    return text.strip().splitlines(), peak[0], time.monotonic() - started


@pytest.mark.parametrize("target", ["tiny", pytest.param("tiny-hybrid", marks=pytest.mark.slow)])
def test_the_short_demo_runs_every_command_and_is_lossless(tmp_path: Path, target: str) -> None:
    options = ("--prompts", "128", "--exam", "6", "--steps", "12")
    lines, _, _ = run_demo(tmp_path / "demo", "--target", target, *options)
    commands = [line.split()[2] for line in lines if line.startswith("$ dflash ")]
    assert commands == [
        "prepare",
        "plan",
        "extract",
        "verify",
        "inspect",
        "train",
        "inspect",
        "evaluate",
        "evaluate",
        "export",
    ]
    assert lines[-2] == "lossless: 6/6"
    assert re.fullmatch(r"acceptance length: \d\.\d\d", lines[-1])
    assert (tmp_path / "demo" / "export" / "model.safetensors").is_file()
    assert list((tmp_path / "demo" / "run").glob("*.png"))


@pytest.mark.slow
def test_the_whole_demo_reaches_its_mark(tmp_path: Path) -> None:
    lines, peak_bytes, seconds = run_demo(tmp_path / "demo")
    print(f"demo: {seconds:.0f} s, peak memory {peak_bytes / MEBIBYTE:.0f} MiB")
    assert lines[-2] == "lossless: 64/64"
    match = re.fullmatch(r"acceptance length: (\d+\.\d\d)", lines[-1])
    assert match is not None
    assert float(match.group(1)) > 5.0
    assert peak_bytes < 3 * 1024 * MEBIBYTE
    untrained = next(line for line in lines if re.search(r"\bstep 0: ", line))
    assert re.search(r"acceptance length 1\.0\d", untrained), untrained


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    done = subprocess.run(
        [sys.executable, "-m", "dflash_offline.cli", "demo", "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_the_hybrid_demo_is_lossless_too(tmp_path: Path) -> None:
    lines, _, seconds = run_demo(tmp_path / "demo", "--target", "tiny-hybrid")
    print(f"demo: {seconds:.0f} s")
    assert lines[-2] == "lossless: 64/64"
    match = re.fullmatch(r"acceptance length: (\d+\.\d\d)", lines[-1])
    assert match is not None
    assert float(match.group(1)) > 5.0


def test_a_disk_that_takes_no_prompts_is_named_in_three_lines() -> None:
    with pytest.raises(UserError, match=r"/proc/demo' failed: .*\(ENOENT\)") as caught:
        demo(DemoConfig(out="/proc/demo", prompts=2, exam=1))
    assert len(str(caught.value).splitlines()) == 3
