"""One small data set, one store made without disturbance, and ways to run and compare stores."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline.extract.config import ExtractConfig, PrepareConfig
from dflash_offline.extract.launch import Dealer, extract, finish
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.writing import Committed, Entry, Room, SegmentFiller
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.writer import StoreWriter, create_store
from dflash_offline.watch import Channel
from processes import children

TAPS = (1, 3, 0)
NUM_SAMPLES = 56


def random_lines(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Token ids with a prompt and an answer, lengths 20 to 150."""
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        length = draw.randrange(20, 150)
        answer = draw.randrange(10, length)
        ids = [draw.randrange(6, 262) for _ in range(length)]
        lines.append({"id": number, "input_ids": ids, "loss_mask": [0] * (length - answer) + [1] * answer})
    return lines


def write_lines(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The input file of `data`."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_lines(path, random_lines(NUM_SAMPLES))
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, case_target: Any, chats: Path) -> Path:
    """DATA of `NUM_SAMPLES` samples for a random target of 6 layers, H = 64."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(PrepareConfig(target=str(case_target()), out=str(folder), split=0.8, min_trained=2), [str(chats)])
    return folder


def config_for(data: Path, store: Path, **changes: Any) -> ExtractConfig:
    settings: dict[str, Any] = {"taps": TAPS, "devices": "cpu", "token_budget": 600, "stall_s": 120.0}
    return ExtractConfig(data=str(data), store=str(store), **(settings | changes))


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ExtractConfig]:
    return config_for


@pytest.fixture(scope="session")
def make_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_data(lines, target) or make_data(lines, target, limit=3): a new DATA folder."""

    def make(lines: list[dict[str, Any]], target: Path, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("made")
        source = write_lines(folder / "chats.jsonl", lines)
        prepare(
            PrepareConfig(
                target=str(target), out=str(folder / "data"), **({"min_trained": 2, "duplicates": "keep"} | changes)
            ),
            [source],
        )
        return folder / "data"

    return make


@pytest.fixture(scope="session")
def whole_store(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The store of `data`, made by one worker in one go; read it, never change it."""
    store = tmp_path_factory.mktemp("stores") / "whole"
    report = extract(config_for(data, store))
    assert (report.num_ok, report.num_kept_segments) == (NUM_SAMPLES, 0)
    return store


class Inline:
    """Writes in this process, without a ring between."""

    def __init__(self, filler: SegmentFiller) -> None:
        self.filler = filler

    def room(self, shape: tuple[int, ...]) -> Room:
        return Room(torch.empty(shape, dtype=torch.uint8))

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        self.filler.write(room.rows.numpy(), entries)


def record_here(config: ExtractConfig, *, with_frozen: bool = True) -> Survey:
    """Extracts what is missing without starting a process: the launcher's and the worker's own parts, in turn."""
    found = survey(config)
    create_store(found.store_dir, found.manifest, found.plan.table, Path(config.data))
    target = load_target(found.facts.name, dtype=found.facts.dtype)
    if with_frozen:
        write_frozen(found.store_dir, *target.frozen())
    dealer = Dealer(found, StoreWriter(found.store_dir, found.manifest).committed())
    committed: list[Committed] = []
    filler = SegmentFiller(found.store_dir, found.manifest, committed.append)
    ours, theirs = Pipe()
    recorder = Recorder(Channel(theirs, "here"), dealer.order("cpu"), found.manifest, target)
    try:
        for group in dealer.groups:
            recorder.record(group, Inline(filler))
            while ours.poll():
                ours.recv()
    finally:
        filler.close()
    assert {message.segment for message in committed} == dealer.own - dealer.kept
    finish(found)
    return found


@pytest.fixture(scope="session")
def extract_here() -> Callable[..., Survey]:
    return record_here


def digests(store: Path) -> dict[str, str]:
    """sha256 of every file of a store but locks."""
    files = sorted(path for path in store.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="session")
def content() -> Callable[[Path], dict[str, str]]:
    return digests


class Run:
    """`dflash extract` as a user starts it: a launcher of its own, with its children."""

    def __init__(self, config: ExtractConfig, *, shards: int, options: tuple[str, ...] = ()) -> None:
        command = [sys.executable, "-m", "dflash_offline.cli", "extract", "--data", config.data]
        command += ["--store", config.store, "--taps", ",".join(map(str, config.taps or ()))]
        command += ["--devices", "cpu", "--token-budget", str(config.token_budget), "--shards", str(shards)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def workers(self) -> dict[int, str]:
        """Living children by process id, with the last word of their command line, their name."""
        return children(self.process.pid, "shard")

    def family(self) -> dict[int, str]:
        """Living children and their children."""
        workers = self.workers()
        return workers | {pid: name for worker in workers for pid, name in children(worker, "shard").items()}

    def end(self, limit_s: float = 60.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; fails when the launcher takes longer."""
        out, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out, err


@pytest.fixture
def start_extract() -> Any:
    """start_extract(config, shards=3): a Run; whatever the test leaves alive is killed after it."""
    runs: list[Run] = []

    def start(config: ExtractConfig, **options: Any) -> Run:
        runs.append(Run(config, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()
