"""Direct writing gives the bytes that plain writing gives, wherever the blocks and the disk cut them."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store import direct
from dflash_offline.store.direct import BLOCK_BYTES, BUFFER_BYTES, DirectFile
from dflash_offline.store.files import NewFile
from hypothesis import given, settings
from hypothesis import strategies as st

EDGES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 5]


def write(path: Path, kind: type[NewFile], samples: list[list[bytes]]) -> bytes:
    with kind(path) as file:
        for sample in samples:
            assert file.write_buffers([memoryview(part) for part in sample]) == sum(map(len, sample))
    assert file.size_bytes == path.stat().st_size
    assert not list(path.parent.glob("*.tmp.*"))
    return path.read_bytes()


def is_direct(file: NewFile) -> bool:
    return bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 3 * BLOCK_BYTES)), max_size=4), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_the_bytes_are_those_of_a_plain_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    random = np.random.default_rng(seed)
    samples = [[random.bytes(size) for size in sample] for sample in sizes]
    found = write(folder / "a", DirectFile, samples)
    assert found == b"".join(b"".join(sample) for sample in samples)
    assert found == write(folder / "b", NewFile, samples)


def test_the_checksum_is_that_of_the_bytes(tmp_path: Path) -> None:
    data = np.frombuffer(np.random.default_rng(0).bytes(2 * BUFFER_BYTES + 77), dtype=np.uint8)
    with DirectFile(tmp_path / "a") as file, file.filling() as filling:
        crc = 0
        for start in range(0, len(data), 1_000_003):
            crc = filling.append(data[start : start + 1_000_003], crc)
    assert crc == google_crc32c.value(data)
    assert (tmp_path / "a").read_bytes() == data.tobytes()


@pytest.mark.parametrize("beside", range(6))
def test_a_checksum_across_the_end_of_the_buffer(tmp_path: Path, beside: int) -> None:
    body = np.full(BUFFER_BYTES - 5 + beside, 7, dtype=np.uint8)
    with DirectFile(tmp_path / "a") as file, file.filling() as filling:
        for _ in range(2):
            filling.append(body)
            filling.seal(b"1234")
    assert (tmp_path / "a").read_bytes() == 2 * (body.tobytes() + b"1234")


def test_files_of_one_thread_take_turns_at_the_buffer(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    expected = [b"" for _ in range(5)]
    files = [DirectFile(tmp_path / str(number)) for number in range(5)]
    for number in random.integers(0, 5, size=200):
        data = random.bytes(int(random.integers(0, 9000)))
        files[number].write(data)
        expected[number] += data
    for number, file in enumerate(files):
        file.finish()
        assert (tmp_path / str(number)).read_bytes() == expected[number]
    one, other = DirectFile(tmp_path / "one"), DirectFile(tmp_path / "other")
    with pytest.raises(AssertionError, match="at once"), one.filling() as filling:
        filling.append(np.frombuffer(b"abc", dtype=np.uint8))
        other.write(b"x")  # would overwrite what the first one holds
    for file in (one, other):
        file.abort()


def test_threads_and_forks_have_buffers_of_their_own(tmp_path: Path) -> None:
    def fill(name: str) -> None:
        data = name.encode() * BUFFER_BYTES
        with DirectFile(tmp_path / name) as file:
            for start in range(0, len(data), 100_001):
                file.write(data[start : start + 100_001])

    with DirectFile(tmp_path / "parent") as file, file.filling() as filling:
        filling.append(np.frombuffer(b"p" * 10_000, dtype=np.uint8))
        child = os.fork()
        if child == 0:
            direct.BOUNCE.bytes[:] = 0
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        threads = [threading.Thread(target=fill, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (tmp_path / "parent").read_bytes() == b"p" * 10_000
    for name in ("a", "b"):
        assert (tmp_path / name).read_bytes() == name.encode() * BUFFER_BYTES


@pytest.fixture
def refusing_disk(tmp_path: Path) -> Iterator[Path]:
    """A ramfs, which has no O_DIRECT; skipped, with the reason, where mounting is refused."""
    disk = tmp_path / "disk"
    disk.mkdir()
    result = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(disk)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting a ramfs was refused: {result.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


WRITER = """
import sys
from pathlib import Path
from dflash_offline.store.direct import DirectFile
for name in "abc":
    with DirectFile(Path(sys.argv[1]) / name) as file:
        file.write(name.encode() * 10_000)
"""


def test_a_file_system_that_refuses_is_named_once_in_a_process(
    refusing_disk: Path, python_environment: dict[str, str]
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WRITER, str(refusing_disk)], env=python_environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert f"{str(refusing_disk)!r} refuses direct writes (O_DIRECT, EINVAL)" in line
    assert "page cache" in line
    assert result.stdout == ""
    for name in "abc":
        assert (refusing_disk / name).read_bytes() == name.encode() * 10_000


def test_a_file_system_that_refuses_at_the_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some accept the flag and then not the write, as with blocks larger than ours."""
    pwrite = os.pwrite

    def refuse(fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(direct.Refusal, "was_said", False)
    samples = [[b"a" * 5000], [b"b" * 5_000_000, b"c"]]
    assert write(tmp_path / "a", DirectFile, samples) == b"".join(map(b"".join, samples))
    assert write(tmp_path / "b", DirectFile, samples) == b"".join(map(b"".join, samples))
    assert capfd.readouterr().err.count("refuses direct writes") == 1


def test_a_disk_that_takes_less_than_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, random = os.pwrite, np.random.default_rng(0)

    def take_less(fd: int, data: memoryview, offset: int) -> int:
        return pwrite(fd, data[: random.integers(1, len(data) // BLOCK_BYTES + 1) * BLOCK_BYTES], offset)

    monkeypatch.setattr(os, "pwrite", take_less)
    samples = [[random.bytes(int(size))] for size in random.integers(0, 200_000, size=20)]
    assert write(tmp_path / "a", DirectFile, samples) == b"".join(map(b"".join, samples))


def test_a_write_cut_inside_a_block_is_repeated_from_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    cuts = [3 * BLOCK_BYTES + 512, BLOCK_BYTES + 1, 10**9]

    def cut(fd: int, data: memoryview, offset: int) -> int:
        return min(cuts.pop(0), pwrite(fd, data, offset))

    data = np.random.default_rng(0).bytes(10 * BLOCK_BYTES)
    with DirectFile(tmp_path / "a") as file:
        monkeypatch.setattr(os, "pwrite", cut)
        file.write(data)
        monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == data
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_is_full_inside_a_block_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fill(fd: int, data: memoryview, offset: int) -> int:
        if len(data) % BLOCK_BYTES:
            raise OSError(code, os.strerror(code))
        return 100

    with pytest.raises(UserError, match=errno.errorcode[code]), DirectFile(tmp_path / "b") as file:
        monkeypatch.setattr(os, "pwrite", fill)
        file.write(bytes(10 * BLOCK_BYTES))
    assert os.listdir(tmp_path) == []


def test_a_limit_inside_a_block_is_no_full_disk(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(UserError, match="EFBIG") as caught, DirectFile(tmp_path / "b") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 + 100, limits[1]))
        try:
            file.write(bytes(2**21))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "ulimit -f" in str(caught.value)
    assert os.listdir(tmp_path) == []


STEPS = ("pwrite", "ftruncate", "fdatasync", "replace", "fsync")


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOENT], ids=errno.errorcode.get
)
@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_fails_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    """One message, no temporary, and what was there under the name stays until it is replaced."""
    write(tmp_path / "a", DirectFile, [[b"first"]])

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(UserError) as caught, DirectFile(tmp_path / "a") as file:
        file.write(b"second" * 1000)
    monkeypatch.undo()
    assert errno.errorcode[code] in caught.value.happened
    assert str(tmp_path / "a") in caught.value.happened
    assert "bytes) are free" in caught.value.expected
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == (b"second" * 1000 if step == "fsync" else b"first")
    write(tmp_path / "a", DirectFile, [[b"third"]])  # the buffer is free again
    assert (tmp_path / "a").read_bytes() == b"third"


def test_what_direct_files_do_not_do(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "a")
    with pytest.raises(ValueError, match="written in blocks"):
        file.patch(0, b"x")
    file.abort()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"x")
    assert os.listdir(tmp_path) == []


PEAK = """
import sys
from pathlib import Path
import numpy as np
from dflash_offline.store.geometry import SegmentGeometry
from dflash_offline.store.segment_writer import SegmentWriter

codec, num_files = sys.argv[2], int(sys.argv[3])
geometry = SegmentGeometry(positions=1024, taps=5, hidden=1024, codec_name=codec)
planes = np.random.default_rng(0).integers(0, 2**14, size=(5, 1000, 1024), dtype=np.uint16)

def peak() -> int:  # not by getrusage: that begins with what the parent has taken
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

if codec == "zstd":
    import numcodecs.blosc
before = peak()
writers = [SegmentWriter(Path(sys.argv[1]) / f"c.{number}.0.0", geometry) for number in range(num_files)]
for writer in writers:
    writer.append(0, planes)
print(peak() - before)
for writer in writers:
    writer.abort()
"""


@pytest.mark.parametrize("codec, num_files", [("raw", 64), ("zstd", 8), ("int8", 2)])
def test_a_writer_needs_little_beside_the_sample(
    tmp_path: Path, python_environment: dict[str, str], codec: str, num_files: int
) -> None:
    """With all segments of a group open, hidden and last: 2 x 32 files."""
    command = [sys.executable, "-c", PEAK, str(tmp_path), codec, str(num_files)]
    result = subprocess.run(command, env=python_environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 32 << 20


def test_this_machine_writes_directly(tmp_path: Path) -> None:
    """Or says why not: the tests above would otherwise only show the fall-back."""
    with DirectFile(tmp_path / "a") as file:
        file.write(b"x" * 10_000)
        if not is_direct(file):
            pytest.skip(f"{tmp_path} refuses O_DIRECT")
