"""How many threads torch gets on a CPU, and how many read for a trainer. A leaf: knows this machine."""

import os

SMALL_HIDDEN_SIZE = 512


def cpu_threads(hidden_size: int) -> int:
    """One for small models, else every core this process may use.

    The matrices of a small model are so short that a second thread gains nothing, and waits
    whenever anything else runs: hidden size 128 on two cores of an AMD EPYC (2026-11-29, torch
    2.13.0, one core busy), 150 training steps took 27 s with one thread and 70 s with two.
    """
    return 1 if hidden_size < SMALL_HIDDEN_SIZE else len(os.sched_getaffinity(0))


def loader_threads(num_local: int, num_cores: int | None = None) -> int:
    """Threads that read for each of `num_local` trainers on this machine: half of its share of the cores, 1 to 4.

    One thread brings about 1.8 GB/s out of the page cache; a small target's rows are trained on faster (hidden size
    576 on an H200 of 16 cores waited a third of its time for one thread, 2026-11-30).
    """
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    return min(4, max(1, cores // (2 * num_local)))
