"""Small stores to recode: what a sample holds follows from its number, in whatever store and place it lies.

Loaded by the tests of `recode`; `source_line` of a sample is its number.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.index import read_plan, write_consolidated
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.samples import SampleTable, SampleWriter
from dflash_offline.store.writer import StoreWriter, create_store

_SPEC = importlib.util.spec_from_file_location("small_store", Path(__file__).with_name("small_store.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
small = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(small)

HIDDEN = 32
TAPS = (1, 9, 17)
EDGES = (65, 66, 2, 129, 64, 63, 128, 3)
FACTS = {"target": "tiny", "tokenizer_sha256": "ab" * 32, "template_sha256": "cd" * 32, "template_options": {}}


def length(number: int) -> int:
    """Tokens of sample `number`, 2 to 299; one position less is recorded."""
    return EDGES[number] if number < len(EDGES) else int(np.random.default_rng([7, number]).integers(2, 300))


def states(number: int, tap: int, hidden: int = HIDDEN, version: int = 0) -> np.ndarray:
    """The states [n, H] u16 of a sample at target layer `tap`; -1 is the last state."""
    values = np.random.default_rng([version, number, tap + 1]).normal(size=(length(number) - 1, hidden))
    values[:, 3] *= 100.0  # the channel that outlives the others
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make_samples(
    folder: Path, numbers: Iterable[int], splits: Mapping[int, str] | None = None, *, has_prompts: bool = False
) -> SampleTable:
    """With prompts, two thirds of each sample come before its answer."""
    with SampleWriter(folder, rows_per_file=7) as writer:
        for number in numbers:
            ids = np.random.default_rng(number).integers(0, 1000, size=length(number))
            split = (splits or {}).get(number, "heldout" if number % 5 == 4 else "train")
            task = ("chat", "code", "mathematics")[number % 3]
            mask = np.arange(len(ids)) >= (min(2 * len(ids) // 3, len(ids) - 2) if has_prompts else 0)
            writer.add(ids, mask, split=split, task=task, source="a.jsonl", source_line=number)
    return SampleTable(folder)


def make_store(
    folder: Path,
    numbers: Sequence[int],
    *,
    fill: Iterable[int] | None = None,
    status: Mapping[int, int] | None = None,
    splits: Mapping[int, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    version: int = 0,
    has_prompts: bool = False,
    **changes: Any,
) -> Path:
    """A store of these samples in `folder/store`; `changes` are fields of its manifest, `fill` segments to write."""
    table = make_samples(folder / "data", numbers, splits, has_prompts=has_prompts)
    plan = small.make_plan(table, window=changes.get("window"))
    target = {"name": "tiny", "weights_sha256": "ab" * 32, "vocab_size": 12}
    data = {"facts": FACTS | dict(facts or {}), "report": {"lines_in": 1}, "fingerprint": table.fingerprint()}
    own = {"target": target, "data": data, "tap_layers": TAPS, "hidden_size": HIDDEN, "has_last": True}
    manifest = replace(small.make_manifest(plan), **(own | changes))
    store = folder / "store"
    create_store(store, manifest, plan, folder / "data")
    fill_segments(store, manifest, range(manifest.num_segments) if fill is None else fill, status, version)
    draw = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in frozen_shapes(manifest.hidden_size).items()}
    write_frozen(store, {name: tensor.bfloat16() for name, tensor in tensors.items()}, manifest.target)
    return store


def frozen_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    return {"embedding": (12, hidden), "norm": (hidden,), "head": (12, hidden)}


def fill_segments(
    store: Path,
    manifest: Manifest,
    segments: Iterable[int],
    status: Mapping[int, int] | None = None,
    version: int = 0,
) -> None:
    writer, lines = StoreWriter(store, manifest), {}
    table = SampleTable(store / "plan")
    first = dict(zip(*(read_plan(store)[name].to_pylist() for name in ("sample_id", "first"))))
    for segment in segments:
        sink = writer.open(segment)
        lines = dict(enumerate(table.column("source_line").tolist()))
        for sample_id, position in zip(sink.plan["sample_id"].tolist(), sink.plan["position"].tolist()):
            number = lines[sample_id - 100]
            code = (status or {}).get(number, 0)
            planes = np.stack([states(number, tap, manifest.hidden_size, version) for tap in manifest.tap_layers])
            last = states(number, -1, manifest.hidden_size, version) if manifest.has_last else None
            planes, last = planes[:, first[sample_id] :], None if last is None else last[first[sample_id] :]
            if code == 2:
                sink.append(sample_id, position, None, status=code)
            else:
                sink.append(sample_id, position, planes, last, status=code)
        sink.commit({"host": "somewhere"})
    write_consolidated(store, manifest.identity_sha256, manifest.num_segments)


def numbers_of(store: Path, **options: Any) -> list[int]:
    """The samples that can be read, in the order of the store."""
    return StoreReader(store, **options).samples.source_line.tolist()


def content(store: Path, **options: Any) -> dict[int, tuple[Any, ...]]:
    """Everything a trainer may read of each sample, by its number: tokens, mask, texts, states, last state."""
    found: dict[int, tuple[Any, ...]] = {}
    with StoreReader(store, **options) as reader:
        manifest, samples = reader.manifest, reader.samples
        for i in range(len(reader)):
            n = int(samples.n[i])
            planes = np.empty((len(manifest.tap_layers), n, manifest.hidden_size), dtype=np.uint16)
            reader.read(i, planes)
            last = np.empty((n, manifest.hidden_size), dtype=np.uint16)
            if manifest.has_last:
                reader.read_last(i, last)
            ids, mask = reader.tokens(i)
            texts = tuple(str(getattr(samples, name)[i]) for name in ("split", "task", "source", "origin"))
            states_ = {layer: plane.tobytes() for layer, plane in zip(manifest.tap_layers, planes)}
            found[int(samples.source_line[i])] = (
                ids.tobytes(),
                mask.tobytes(),
                texts,
                states_,
                last.tobytes() if manifest.has_last else None,
            )
    return found
