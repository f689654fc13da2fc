"""How fast a GPU records, and what writing costs it: nothing written, written by the worker, by its writer.

Makes a random target of Qwen3 shape, samples of random ids, and records one store three times:
    python tests/bench/extract_speed.py --layers 18 --samples 120 --dir DIR [--device cuda:0]
"""

import argparse
import json
import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.launch import Dealer
from dflash_offline.extract.plan import make_plan
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.shares import own_groups
from dflash_offline.extract.survey import Survey
from dflash_offline.extract.targets.base import default_taps
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.writing import Entry, Room, SegmentFiller, WriterProcess
from dflash_offline.store.create import create_store
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.samples import SampleTable, SampleWriter
from dflash_offline.store.size import bytes_per_position
from dflash_offline.watch import Channel
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

TINY = Path(__file__).parents[2] / "extract" / "targets" / "tiny-qwen3"


class Nowhere:
    """Takes the states off the device and drops them."""

    def room(self, shape: tuple[int, ...]) -> Room:
        return Room(torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None: ...


class Inline(Nowhere):
    """Writes in the worker itself."""

    def __init__(self, filler: SegmentFiller) -> None:
        self.filler = filler

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        self.filler.write(room.rows.numpy(), entries)


def make_target(folder: Path, layers: int, hidden: int, device: str) -> None:
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)


def make_samples(folder: Path, count: int) -> SampleTable:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(1500), 0.8, size=count), 50, 8192).astype(int)
    with SampleWriter(folder) as writer:
        for line, n in enumerate(lengths):
            writer.add(draw.integers(6, 500, n), np.ones(n), split="train", task="", source="", source_line=line)
    return SampleTable(folder)


def lay_out(config: ExtractConfig, target: HfTarget, samples: SampleTable, device: str) -> Survey:
    taps = default_taps(target.facts.num_layers)
    width = bytes_per_position(len(taps), target.facts.hidden_size)
    plan = make_plan(samples, bytes_per_position=width)
    manifest = Manifest(
        target=target.facts.as_plain(),
        data={},
        tap_layers=taps,
        hidden_size=target.facts.hidden_size,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        num_samples=plan.num_samples,
        num_positions=plan.num_positions,
        plan_sha256=plan.sha256,
    )
    shutil.rmtree(config.store, ignore_errors=True)
    create_store(Path(config.store), manifest, plan.table, samples.folder)
    return Survey(
        config=config,
        samples=samples,
        facts=target.facts,
        plan=plan,
        manifest=manifest,
        workers=(device,),
        num_asked=plan.num_segments,
        groups=tuple(own_groups(plan.num_segments, plan.num_segments, 1, None)),
    )


def measure(how: str, config: ExtractConfig, target: HfTarget, samples: SampleTable, device: str) -> float:
    """Recorded positions a second, until everything is committed."""
    found = lay_out(config, target, samples, device)
    dealer = Dealer(found, set())
    ours, theirs = Pipe()
    Thread(target=drain, args=(ours,), daemon=True).start()
    channel = Channel(theirs, how)
    recorder = Recorder(channel, dealer.order(device), found.manifest, target)
    writer: AbstractContextManager[Any] = nullcontext(Nowhere())
    if how == "by the worker":
        writer = nullcontext(Inline(SegmentFiller(found.store_dir, found.manifest, channel.tell)))
    elif how == "by its writer":
        slot_bytes = recorder.largest_batch_bytes()
        writer = WriterProcess(channel, found.store_dir, slot_bytes=slot_bytes, device=device, stall_s=600.0)
    recorder.record(dealer.groups[0], Nowhere())  # warm-up, and the check before the first segment
    with writer as entered:
        started = time.perf_counter()
        for group in dealer.groups:
            recorder.record(group, entered)
        recorded_s = time.perf_counter() - started
        if isinstance(entered, WriterProcess):
            entered.finish()
        wall_s = time.perf_counter() - started
    positions = found.plan.num_positions
    gigabytes = positions * 2e-9 * len(found.manifest.tap_layers) * target.facts.hidden_size
    print(
        f"{how:16} {positions / wall_s:9,.0f} positions/s, {gigabytes / wall_s:5.2f} GB/s, "
        f"recorded in {recorded_s:.2f} s, all in {wall_s:.2f} s",
        flush=True,
    )
    return positions / wall_s


def drain(connection: Any) -> None:
    with suppress(EOFError):
        while True:
            connection.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    if args.device != "cpu":
        torch.cuda.set_device(args.device)
    make_target(args.dir / "target", args.layers, args.hidden, args.device)
    samples = make_samples(args.dir / "data", args.samples)
    target = load_target(str(args.dir / "target"), device=args.device)
    config = ExtractConfig(store=str(args.dir / "store"), token_budget=args.token_budget)
    rates = {
        how: measure(how, config, target, samples, args.device)
        for how in ("nothing written", "by the worker", "by its writer")
    }
    rows = [{"name": f"rate {how}", "value": round(rate), "unit": "positions/s"} for how, rate in rates.items()]
    share = rates["by its writer"] / rates["nothing written"]
    rows.append({"name": "rate by its writer over nothing written", "value": round(share, 3), "unit": "ratio"})
    print(json.dumps({"bench": "extract_speed", "rows": rows}))


if __name__ == "__main__":
    main()
