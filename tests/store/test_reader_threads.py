"""Several threads, and reads past the page cache, give what one thread and the page cache give."""

import ctypes
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.buffers import whole_pages
from dflash_offline.store.geometry import SegmentGeometry
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.reader import Request, StoreReader
from dflash_offline.store.segment_reader import SegmentReader
from dflash_offline.store.segment_writer import SegmentWriter

Store = tuple[Path, Manifest]


@pytest.fixture(scope="module", params=["raw", "zstd", "int8:2"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> Store:
    return small.make_store(tmp_path_factory.mktemp("store"), codec=request.param)[:2]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIECE_BYTES", "UNCHECKED_PIECE_BYTES"):
        monkeypatch.setattr(f"dflash_offline.store.slices.{name}", 3000)  # a chunk of these stores is about 1000


def requests(reader: StoreReader, *, encoded: bool = False) -> list[Request]:
    """Whole samples, slices and chosen taps, all over the store."""
    geometry, made = reader.geometries["hidden"], []
    width, kind = (geometry.row_bytes, np.uint8) if encoded else (geometry.hidden, np.uint16)
    for i, n in enumerate(reader.samples.n.tolist()):
        made.append(Request(i, np.zeros((3, n, width), kind)))
        made.append(Request(i, np.zeros((2, n - n // 2, width), kind), [2, 0], n // 2, n))
        made.append(Request(i, np.zeros((1, 1, width), kind), [1], n // 2, n // 2 + 1))
    return made


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("encoded", [False, True])
def test_every_number_of_threads_reads_the_same(store: Store, threads: int, encoded: bool) -> None:
    with StoreReader(store[0]) as one, StoreReader(store[0], threads=threads) as reader:
        expected = requests(one, encoded=encoded)
        read = one.read_rows if encoded else one.read
        for i, out, taps, start, stop in expected:
            read(i, out, taps=taps, start=start, stop=stop)
        found = requests(reader, encoded=encoded)
        reader.read_many(found, encoded=encoded)
        assert all(np.array_equal(a.out, b.out) for a, b in zip(found, expected))
        i = int(np.argmax(reader.samples.n))
        out = np.zeros_like(expected[3 * i].out)
        (reader.read_rows if encoded else reader.read)(i, out)
        assert np.array_equal(out, expected[3 * i].out)


def test_requests_in_more_segments_than_may_be_open(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_offline.store.reader.MAX_OPEN_SEGMENTS", 2)
    with StoreReader(store[0], threads=2) as reader, StoreReader(store[0]) as one:
        mixed = np.random.default_rng(0).permutation(60)
        found, expected = requests(reader), requests(one)
        reader.read_many([found[number] for number in mixed])
        one.read_many(expected)
        assert all(np.array_equal(a.out, b.out) for a, b in zip(found, expected))
        assert len(reader.segments) <= 2
        reader.read_many([])


def outcome(store_dir: Path, threads: int, order: Callable[[list[Request]], list[Request]]) -> tuple[str, ...]:
    with StoreReader(store_dir, threads=threads) as reader:
        with pytest.raises(UserError) as caught:
            reader.read_many(order(requests(reader)))
        return caught.value.happened, caught.value.expected, caught.value.advice


@pytest.mark.parametrize("threads", [2, 4])
def test_the_first_error_is_the_same(store: Store, tmp_path: Path, threads: int) -> None:
    store_dir = Path(shutil.copytree(store[0], tmp_path / "copy"))
    rng = np.random.default_rng(1)
    for segment in range(1, store[1].num_segments):
        path = store_dir / f"hidden/c.{segment}.0.0"
        data = bytearray(path.read_bytes())
        for place in rng.integers(0, len(data) * 3 // 4, size=3):
            data[place] ^= 8
        path.write_bytes(data)
    shutil.copy(store_dir / "hidden/c.0.0.0", aside := tmp_path / "aside")
    orders: list[Callable[[list[Request]], list[Request]]] = [list, lambda r: r[::-1], lambda r: r[7::2] + r[::2]]
    for order in orders:
        expected = outcome(store_dir, 1, order)
        assert "checksum" in expected[0]
        for _ in range(5):
            assert outcome(store_dir, threads, order) == expected
    os.truncate(store_dir / "hidden/c.0.0.0", aside.stat().st_size - 1)
    assert outcome(store_dir, threads, list) == (expected := outcome(store_dir, 1, list))
    assert "its commit says" in expected[0]


def test_states_that_were_not_committed_come_before_later_damage(
    store: Store, tmp_path: Path, small: ModuleType
) -> None:
    """Segment 0 is sound but another one than the committed; segment 1 is damaged."""
    store_dir = Path(shutil.copytree(store[0], tmp_path / "copy"))
    commit = (store_dir / "commits/00000000.arrow").read_bytes()
    sink = small.StoreWriter(store_dir, store[1]).open(0)
    for row in range(len(sink.plan["sample_id"])):
        sample_id, position, n = (int(sink.plan[name][row]) for name in ("sample_id", "position", "n"))
        sink.append(sample_id, position, small.states(sample_id + 1, n), small.states(5, n, 1)[0])
    sink.commit({})
    (store_dir / "commits/00000000.arrow").write_bytes(commit)
    path = store_dir / "hidden/c.1.0.0"
    path.write_bytes(b"\xff" * 50 + path.read_bytes()[50:])
    reason = "not those of the commit"
    if store[1].codec == "zstd":
        reason = "its commit says"  # other states compress to another length
    for threads in (1, 2, 4):
        assert reason in outcome(store_dir, threads, list)[0]


def test_misuse_is_refused_before_anything_is_read(store: Store) -> None:
    for threads in (0, 5):
        with pytest.raises(ValueError, match="threads"):
            StoreReader(store[0], threads=threads)
    with StoreReader(store[0], threads=2) as reader:
        found = requests(reader)
        wrong = [*found, Request(0, np.zeros((1, 1, 1), np.uint16))]
        with pytest.raises(ValueError):
            reader.read_many(wrong)
        assert not any(request.out.any() for request in found)


def test_closing_ends_the_threads_and_reading_starts_them_again(store: Store) -> None:
    others = set(threading.enumerate())  # of a reader that nobody closed

    def names() -> list[str]:
        own = set(threading.enumerate()) - others
        return [thread.name for thread in own if thread.name.startswith("store-reader")]

    reader = StoreReader(store[0], threads=3)
    assert names() == []
    for _ in range(2):
        reader.read_many(requests(reader))
        assert 1 <= len(names()) <= 3
        reader.close()
        assert names() == []
        assert not reader.segments


def resident_pages(path: Path) -> np.ndarray:
    """Which pages of a file are in the page cache [pages] bool, by mincore."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return (np.frombuffer(bytes(found), np.uint8) & 1).astype(bool)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_uncached_reader_leaves_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: ModuleType, threads: int
) -> None:
    """Samples here and there, wide ones: neither theirs nor what the system would read beyond them."""
    monkeypatch.setattr(small, "HIDDEN", 1024)
    monkeypatch.setattr(small, "states", partial(small.states, hidden=1024))
    store_dir, manifest, _ = small.make_store(tmp_path, 24, has_last=False)
    paths = sorted((store_dir / "hidden").glob("c.*"))
    left = {}
    for is_uncached in (True, False):
        for path in paths:
            drop_file(path)
        if any(resident_pages(path).any() for path in paths):
            pytest.skip("this file system keeps its pages (tmpfs?)")
        with StoreReader(store_dir, uncached=is_uncached, threads=threads) as reader:
            for i in range(0, len(reader), 5):
                shape = (len(manifest.tap_layers), int(reader.samples.n[i]), manifest.hidden_size)
                reader.read(i, np.zeros(shape, np.uint16))
        left[is_uncached] = sum(int(resident_pages(path).sum()) for path in paths)
    assert left[True] <= 2 * len(paths)  # an index, read once at opening, lies in one page or in two
    assert left[False] > 20 * len(paths)


def drop_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_dropped_slice_leaves_no_pages(tmp_path: Path) -> None:
    geometry, path = SegmentGeometry(positions=4096, taps=2, hidden=256), tmp_path / "a"
    planes = np.random.default_rng(0).integers(0, 2**15, size=(2, 4000, 256), dtype=np.uint16)
    writer = SegmentWriter(path, geometry)
    writer.append(0, planes)
    writer.finish()
    drop_file(path)
    if resident_pages(path).any():
        pytest.skip("this file system keeps its pages (tmpfs?)")
    reader = SegmentReader(path, geometry)
    for start, n in ((100, 333), (0, 4000)):
        out = np.zeros((2, n, 256), np.uint16)
        wanted = reader.slice(0, n, out, None, start, verify=True, encoded=False)
        wanted.read()
        assert np.array_equal(out, planes[:, start : start + n])
        assert resident_pages(path)[:-256].any(), "pages that a read leaves are seen"
        wanted.drop()
    assert not resident_pages(path)[:-256].any()  # what the kernel read ahead of the index may stay, at the file's end
    reader.close()


def test_an_uncached_reader_reads_the_same(store: Store) -> None:
    with StoreReader(store[0]) as plain, StoreReader(store[0], uncached=True, threads=2) as reader:
        expected, found = requests(plain), requests(reader)
        plain.read_many(expected)
        reader.read_many(found)
        assert all(np.array_equal(a.out, b.out) for a, b in zip(found, expected))


def test_whole_pages() -> None:
    page = mmap.PAGESIZE
    assert whole_pages(0, 1) == (0, page)
    assert whole_pages(page - 1, 2) == (0, 2 * page)
    assert whole_pages(3 * page, page) == (3 * page, page)
