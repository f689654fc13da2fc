"""What of a step counts as waiting for a row."""

import time

import pytest
import torch
from dflash_offline.train.clock import StepClock

CPU = torch.device("cpu")
PAUSE_S = 0.05


def test_waits_belong_to_the_update_that_they_lie_in() -> None:
    clock = StepClock(CPU)
    with clock.waiting():
        time.sleep(PAUSE_S)  # before the first update
    clock.begin()
    with clock.waiting():
        time.sleep(PAUSE_S)
    time.sleep(PAUSE_S)
    with clock.waiting():
        time.sleep(PAUSE_S)
    first = clock.end()
    clock.begin()
    second = clock.end()
    assert 2 * PAUSE_S <= first.wait_s() <= first.step_s() - PAUSE_S
    assert second.wait_s() == 0.0
    assert second.step_s() < PAUSE_S


@pytest.mark.gpu
def test_a_host_that_waits_while_the_device_computes_costs_nothing() -> None:
    """The row comes late for the host alone, then for the device as well."""
    device = torch.device("cuda")
    clock, waited_s = StepClock(device), []
    for cycles in (400_000_000, 1):  # some 0.2 s, and nothing
        torch.cuda.synchronize()
        clock.begin()
        torch.cuda._sleep(cycles)
        with clock.waiting():
            time.sleep(PAUSE_S)
        times = clock.end()
        assert times.step_s() >= 0.9 * PAUSE_S
        waited_s.append(times.wait_s())
    assert waited_s[0] < 0.1 * PAUSE_S
    assert waited_s[1] == pytest.approx(PAUSE_S, rel=0.2)
