"""How many threads torch gets on a CPU. A leaf: knows the width of a model and this machine."""

import os

SMALL_HIDDEN_SIZE = 512


def cpu_threads(hidden_size: int) -> int:
    """One for small models, else every core this process may use.

    The matrices of a small model are so short that a second thread gains nothing, and waits
    whenever anything else runs: hidden size 128 on two cores of an AMD EPYC (2026-11-29, torch
    2.13.0, one core busy), 150 training steps took 27 s with one thread and 70 s with two.
    """
    return 1 if hidden_size < SMALL_HIDDEN_SIZE else len(os.sched_getaffinity(0))
