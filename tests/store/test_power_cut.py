"""A power cut after any system call: what was not synced is gone, and the store still holds what it says.

The calls that write a small store are recorded and replayed up to a point into the disk of `disk_model.py`, which
forgets as POSIX allows; what is left is opened, read and completed.
"""

import errno
import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.files import remove_temporaries
from dflash_offline.store.index import write_consolidated
from dflash_offline.store.reader import StoreReader

DATA_KINDS = ("lost", "zeros", "kept", "torn")


def load_model() -> Any:
    spec = importlib.util.spec_from_file_location("disk_model", Path(__file__).with_name("disk_model.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


model = load_model()


class Story:
    """A store that is made, filled, indexed, and has one segment recorded again with other states."""

    def __init__(self, small: ModuleType, folder: Path, patch: pytest.MonkeyPatch, *, can_link: bool = True) -> None:
        self.small = small
        self.data = folder / "pristine"
        plan = small.make_plan(small.make_samples(self.data, 8, rows_per_file=5), 256)
        self.manifest = small.make_manifest(plan, segment_positions=256)
        self.plan = plan
        self.again = {row["sample_id"] for row in plan.to_pylist() if row["segment"] == 1}
        world = folder / "world"
        shutil.copytree(self.data, world / "data")
        self.start = {f"data/{name}": data for name, data in small.tree(world / "data").items()}
        with patch.context() as patches:
            recorder = model.Recorder(world, patches)
            if not can_link:
                patches.setattr(os, "link", refuse)
            self.tell(world / "store", world / "data", recorder.calls)
        self.calls = recorder.calls
        self.whole = {"old": small.tree(folder / "old"), "new": small.tree(world / "store")}
        self.world = world

    def tell(self, store: Path, data: Path, calls: list[tuple]) -> None:
        """Writes the store and notes, between the calls, what it has promised."""
        small, plan, manifest = self.small, self.plan, self.manifest
        small.create_store(store, manifest, plan, data)
        calls.append(("promise", "created"))
        writer = small.StoreWriter(store, manifest)
        for segment in range(manifest.num_segments):
            self.fill(writer, segment, "old")
            calls.append(("promise", segment))
        write_consolidated(store, manifest.identity_sha256, manifest.num_segments)
        shutil.copytree(store, store.parent.parent / "old")
        calls.append(("withdraw", 1))
        self.fill(writer, 1, "new")
        calls.append(("promise", 1))
        write_consolidated(store, manifest.identity_sha256, manifest.num_segments)

    def states(self, sample_id: int, n: int, version: str, planes: int = 3) -> np.ndarray:
        return self.small.states(sample_id + (10**7 if version == "new" and sample_id in self.again else 0), n, planes)

    def fill(self, writer: Any, segment: int, version: str) -> None:
        sink = writer.open(segment)
        for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
            planes = self.states(sample_id, n, version)
            sink.append(sample_id, position, planes, planes[0])
        sink.commit({})

    def check(self, store: Path, promised: set[Any]) -> None:
        """Raises where the store does not hold what it promised or says, or cannot be completed."""
        try:
            with StoreReader(store, partial=True) as reader:
                self.check_reader(reader, promised - {"created"})
        except UserError:
            if promised:
                raise
        self.small.create_store(store, self.manifest, self.plan, self.data)
        writer = self.small.StoreWriter(store, self.manifest)
        missing = set(range(self.manifest.num_segments)) - writer.committed()
        remove_temporaries(store, range(self.manifest.num_segments))
        for segment in missing:
            self.fill(writer, segment, "new")
        write_consolidated(store, self.manifest.identity_sha256, self.manifest.num_segments)
        found = self.small.tree(store)
        if found not in self.whole.values():
            whole = self.whole["new"]
            names = sorted(name for name in {*found, *whole} if found.get(name) != whole.get(name))
            raise AssertionError(f"the completed store differs in {names}")

    def check_reader(self, reader: StoreReader, promised: set[int]) -> None:
        found = set(reader.samples.segment.tolist())
        assert promised <= found, f"segments {promised - found} were committed and are gone"
        table = {row["sample_id"]: row for row in self.plan.to_pylist()}
        versions: dict[int, set[str]] = {segment: {"old", "new"} for segment in found}
        for i, sample_id in enumerate(reader.samples.sample_id.tolist()):
            n = table[sample_id]["n"]
            out = np.empty((3, n, self.small.HIDDEN), np.uint16)
            last = np.empty((1, n, 2 * self.small.HIDDEN), np.uint8)
            reader.read(i, out)
            reader.read_rows(i, last, array="last")
            assert np.array_equal(last.view(np.uint16)[0], out[0])
            ids, mask = reader.tokens(i)
            assert len(ids) == len(mask) == n + 1
            versions[table[sample_id]["segment"]] &= {
                version for version in ("old", "new") if np.array_equal(out, self.states(sample_id, n, version))
            }
        assert all(versions.values()), "a segment holds neither the old nor the new states"

    def cuts(
        self, disk: Any, calls: Sequence[tuple], data_kinds: Sequence[str], **how: bool
    ) -> Iterator[tuple[dict, set]]:
        """Each tree that a cut may leave of the store, once, with what had been promised by then."""
        seen, promised = set(), set[Any]()
        for number in range(len(calls) + 1):
            for tree in disk.left(data_kinds, **how):
                own = {name[6:]: data for name, data in tree.items() if name.startswith("store/")}
                digest = hashlib.sha256(repr((sorted(own.items()), sorted(map(str, promised)))).encode()).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield own, set(promised)
            if number < len(calls):
                kind, *values = calls[number]
                if kind in ("promise", "withdraw"):
                    (promised.add if kind == "promise" else promised.discard)(values[0])
                else:
                    disk.play(calls[number])


def refuse(*_: Any) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def lay_down(tree: dict[str, bytes], store: Path) -> None:
    for name, data in tree.items():
        path = store / name
        if name.endswith("/") or not name:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(data)


def faults(
    story: Story, folder: Path, disk: Any, calls: Sequence[tuple], data_kinds: Sequence[str], **how: bool
) -> tuple[int, list[str]]:
    """How many different trees were checked, and the errors."""
    count, found = 0, []
    for count, (tree, promised) in enumerate(story.cuts(disk, calls, data_kinds, **how), 1):
        store = folder / f"cut-{count}"
        lay_down(tree, store)
        try:
            story.check(store, promised)
        except (UserError, AssertionError) as error:
            found.append(f"{sorted(map(str, promised))}: {error}")
        shutil.rmtree(store, ignore_errors=True)
    return count, found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The real disk need not sync: only the model's does."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)
    return monkeypatch


def test_the_recording_misses_nothing(small: ModuleType, memory_folder: Path, quick: pytest.MonkeyPatch) -> None:
    """Replayed to its end, the model's disk holds what the real one holds."""
    story = Story(small, memory_folder, quick)
    disk = model.Disk(story.start)
    for call in story.calls:
        if call[0] not in ("promise", "withdraw"):
            disk.play(call)
    found = list(disk.left(["kept"]))[-1]
    real = {str(path.relative_to(story.world)): path for path in story.world.rglob("*")}
    assert {name for name in found if not name.endswith("/")} == {n for n, path in real.items() if path.is_file()}
    assert all(found[name] == path.read_bytes() for name, path in real.items() if path.is_file())
    assert story.whole["old"] != story.whole["new"]


@pytest.mark.parametrize(
    "is_data_synced, can_link",
    [
        (False, True),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_a_power_cut_after_any_call(
    small: ModuleType, memory_folder: Path, quick: pytest.MonkeyPatch, is_data_synced: bool, can_link: bool
) -> None:
    """The samples may have been copied here a moment ago, so that they are on no disk yet."""
    story = Story(small, memory_folder, quick, can_link=can_link)
    disk = model.Disk(story.start, is_synced=is_data_synced)
    count, found = faults(story, memory_folder, disk, story.calls, DATA_KINDS)
    assert not found, f"{len(found)} of {count}, first {found[0]}"
    assert count > 150


@pytest.mark.parametrize("forgotten", ["File", "Folder"])
def test_without_its_syncs_the_store_would_not_survive(
    small: ModuleType, memory_folder: Path, quick: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The model can fail: without the syncs of files, or those of folders, it finds damage."""
    story = Story(small, memory_folder, quick)
    calls, nodes = [], model.Disk(story.start)
    for call in story.calls:
        is_sync = call[0] == "sync" and isinstance(nodes.open_files[call[1]], getattr(model, forgotten))
        if call[0] not in ("promise", "withdraw"):
            nodes.play(call)
        calls += [] if is_sync else [call]
    _, found = faults(story, memory_folder, model.Disk(story.start), calls, ["lost"], together=True)
    assert found
