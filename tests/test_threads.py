"""How many threads a process gets."""

import pytest
from dflash_offline.threads import cpu_threads, loader_threads


@pytest.mark.parametrize(
    "num_cores, num_local, expected", [(1, 1, 1), (2, 1, 1), (4, 1, 2), (16, 1, 4), (16, 4, 2), (8, 8, 1), (128, 8, 4)]
)
def test_a_loader_reads_with_half_of_its_trainers_share_of_the_cores(num_cores, num_local, expected) -> None:
    assert loader_threads(num_local, num_cores) == expected


def test_a_loader_has_a_thread_on_this_machine() -> None:
    assert 1 <= loader_threads(1) <= 4
    assert loader_threads(1024) == 1


def test_small_models_take_one_thread() -> None:
    assert cpu_threads(64) == 1
    assert cpu_threads(4096) >= 1
