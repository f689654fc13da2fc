"""Memory shared by two processes that leaves nothing behind."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.ring import Ring, RingHandle

CREATOR = """
import pickle, sys
from dflash_offline.store.ring import Ring
ring = Ring.create(5000, 3)
ring.slot(1)[:] = 7
sys.stdout.buffer.write(pickle.dumps(ring.handle()))
sys.stdout.buffer.flush()
sys.stdin.readline()
print(int(ring.slot(2)[4999]), file=sys.stderr, flush=True)
sys.stdin.read()
"""


def start_creator(environment: dict[str, str]) -> tuple[subprocess.Popen, RingHandle]:
    creator = subprocess.Popen(
        [sys.executable, "-c", CREATOR],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert creator.stdout is not None
    return creator, pickle.load(creator.stdout)


def test_two_processes_see_the_same_bytes(python_environment: dict[str, str]) -> None:
    creator, handle = start_creator(python_environment)
    assert creator.stdin is not None
    assert creator.stderr is not None
    try:
        ring = Ring.open(handle)
        assert (ring.slot(1) == 7).all()
        assert not ring.slot(0).any()
        ring.slot(2)[4999] = 99
        creator.stdin.write(b"\n")
        creator.stdin.flush()
        assert creator.stderr.readline() == b"99\n"
    finally:
        creator.send_signal(signal.SIGKILL)
        creator.communicate()
    assert ring.slot(2)[4999] == 99  # the memory lives as long as somebody holds it
    ring.close()


def test_a_killed_process_leaves_nothing(python_environment: dict[str, str]) -> None:
    creator, handle = start_creator(python_environment)
    num_names = os.stat(f"/proc/{handle.pid}/fd/{handle.fd}").st_nlink
    creator.send_signal(signal.SIGKILL)
    creator.communicate()
    assert num_names == 0, "memory that has a name outlives its process"
    with pytest.raises(UserError, match=f"process {handle.pid}"):
        Ring.open(handle)


def test_slots_are_apart_and_on_pages() -> None:
    ring = Ring.create(5000, 3)
    places = [ring.slot(i).ctypes.data for i in range(3)]
    assert all(place % 4096 == 0 for place in places)
    for i in range(3):
        ring.slot(i)[:] = i + 1
    assert [np.unique(ring.slot(i)).tolist() for i in range(3)] == [[1], [2], [3]]
    planes = ring.slot(1)[:4800].view(np.uint16).reshape(3, 100, 8)  # as the loader looks at a slot
    planes[:] = 5
    assert ring.slot(1)[0] == 5
    ring.close()
    assert (planes == 5).all()  # a view handed out stays valid
    with pytest.raises(ValueError, match="closed"):
        ring.slot(0)


def test_another_file_under_the_same_number_is_no_ring(tmp_path: Path) -> None:
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    ring = Ring.create(100, 1)
    handle = ring.handle()
    ring.close()
    os.dup2(other, handle.fd)
    try:
        with pytest.raises(UserError, match="cannot be opened"):
            Ring.open(handle)
    finally:
        os.close(handle.fd)
        os.close(other)


@pytest.mark.parametrize("slot_bytes, slots", [(0, 1), (1, 0)])
def test_an_empty_ring_is_refused(slot_bytes: int, slots: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Ring.create(slot_bytes, slots)


def test_a_slot_outside_is_refused() -> None:
    ring = Ring.create(10, 2)
    for number in (-1, 2):
        with pytest.raises(IndexError):
            ring.slot(number)
    ring.close()


def test_more_memory_than_there_is_says_so() -> None:
    with pytest.raises(UserError, match="does not fit into memory"):
        Ring.create(1 << 55, 4)
