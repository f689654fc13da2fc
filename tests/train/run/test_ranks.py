"""Ranks of one machine as real processes over gloo: what they sum, compare, and how they end together."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.train.order import Place, num_rows_of_rank, share_of_rank
from dflash_offline.train.rank import Rank, choose_devices, device_of, rank_in, ranks_here, require_rows
from dflash_offline.watch import ChildDied, Job, Stalled, run_all
from processes import is_alive


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import rank_children  # pyright: ignore[reportMissingImports]

    return rank_children


def run_ranks(function: Callable[..., None], *args: Any, count: int = 2, stall_s: float = 300.0) -> dict[str, dict]:
    """Runs the function on each rank; what they told, by kind."""
    told: dict[str, dict] = {}

    def hear(_name: str, message: Any) -> int | None:
        kind, numbers = message
        told.setdefault(kind, {}).update(numbers)
        return told["port"].get("port")

    ranks = [Rank(number=i, count=count, num_local=count) for i in range(count)]
    try:
        run_all([Job(rank.name, function, (rank, *args)) for rank in ranks], stall_s=stall_s, on_message=hear)
    finally:
        assert not any(is_alive(pid) for pid in told.get("pid", {}).values())
    return told


def test_ranks_sum_in_chunks_and_gather_in_order(children: ModuleType) -> None:
    found = run_ranks(children.sum_up, count=3)["found"]
    flat = (np.arange(20, dtype=np.float32) * 6).tolist()
    expected = (flat, [6.0, 33.0], [3.0, 3.0], ["trainer 0", "trainer 1", "trainer 2"])
    assert found == {0: expected, 1: expected, 2: expected}


def test_ranks_that_differ_are_named_with_both_values(children: ModuleType) -> None:
    with pytest.raises(UserError, match="weights after step 3: rank 0 has aa, rank 1 has bb"):
        run_ranks(children.disagree)


def test_the_reason_of_one_rank_is_told_before_the_loss_of_the_others(children: ModuleType) -> None:
    with pytest.raises(UserError, match="the disk of rank 1 is full"):
        run_ranks(children.refuse_one)
    with pytest.raises(ChildDied, match="trainer 1 was killed by SIGKILL"):
        run_ranks(children.lose_one)


def test_a_rank_that_never_comes_is_named_with_the_stacks_of_those_who_wait(
    children: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    run_ranks(children.sum_up)
    start_s = time.monotonic() - began  # of which ranks are silent for the greater part
    with pytest.raises(Stalled, match="a sign of life from trainer 1 for"):
        run_ranks(children.hang_apart, stall_s=6.0 + 3.0 * start_s)
    stacks = capfd.readouterr().err
    assert "all_gather_object" in stacks, "where trainer 0 waits"
    assert "in sleep_for_ever" in stacks


class Passes:
    """A stand-in for an order with passes of 5 rows, then 3, then 5 ..."""

    def since(self, start: Place):
        epoch, row = start
        while True:
            length = 5 if epoch % 2 == 0 else 3
            for number in range(row, length):
                yield Place(epoch, number), np.array([epoch * 100 + number])
            epoch, row = epoch + 1, row - min(row, length)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows_per_step", [4, 5])
def test_the_ranks_have_every_row_once_and_agree_on_the_next_step(num_ranks: int, rows_per_step: int) -> None:
    passes: Any = Passes()
    every = passes.since(Place(0, 0))
    shares = [share_of_rank(passes, Place(0, 0), rows_per_step, rank, num_ranks) for rank in range(num_ranks)]
    for _ in range(6):
        step = [next(every)[0] for _ in range(rows_per_step)]
        own = [
            [next(share) for _ in range(num_rows_of_rank(rows_per_step, rank, num_ranks))]
            for rank, share in enumerate(shares)
        ]
        assert [row.place for rows in own for row in rows] == [
            place for rank in range(num_ranks) for place in step[rank::num_ranks]
        ]
        afters = {row.after for rows in own for row in rows}
        assert afters == {Place(step[-1].epoch, step[-1].row + 1)}
        resumed = next(share_of_rank(passes, afters.pop(), rows_per_step, 0, num_ranks))
        following = passes.since(Place(step[-1].epoch, step[-1].row + 1))
        assert resumed.place == next(following)[0]


def devices_of(text: str, num_cuda: int = 0, rows: int | None = None) -> list[str]:
    return choose_devices(text, num_cuda, rows)


def test_devices_as_typed_and_by_default() -> None:
    assert devices_of("6,7") == devices_of("cuda:6,cuda:7") == devices_of("6-7") == ["cuda:6", "cuda:7"]
    assert devices_of("cuda") == devices_of("0") == ["cuda:0"]
    assert devices_of("cpu, cpu") == ["cpu", "cpu"]
    assert devices_of("auto") == ["cpu"]
    assert devices_of("auto", 8) == ["cuda:6", "cuda:7"]
    assert devices_of("auto", 2) == ["cuda:0", "cuda:1"]
    assert devices_of("auto", 8, rows=1) == ["cuda:6"]


@pytest.mark.parametrize("text", ["gpu6", "6,,7", "", "7-6", "6,6", "cpu,0", "cuda:0+cuda:1", "-1"])
def test_text_that_names_no_devices_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="devices = ") as caught:
        devices_of(text)
    assert len(str(caught.value).splitlines()) == 3


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}


def test_a_rank_of_torchrun_or_srun() -> None:
    expected = [Rank(number=5, count=8, device="cuda:1", has_address=True)]
    assert ranks_here("auto", 4, None, TORCHRUN) == expected
    address = {name: TORCHRUN[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    assert ranks_here("auto", 4, None, SRUN | address) == expected
    assert rank_in({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) is None, "a batch script"
    assert ranks_here("cpu", 0, None, {}) == [Rank()]
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT are not set"):
        ranks_here("auto", 4, None, SRUN)
    with pytest.raises(UserError, match="WORLD_SIZE = ''"):
        rank_in({"RANK": "0", "LOCAL_RANK": "0"})
    assert [device_of("6,7", 0, local) for local in (0, 1)] == ["cuda:6", "cuda:7"]
    assert device_of("auto", 1, 3) == "cuda:0", "a launcher that shows each process its own GPU"
    with pytest.raises(UserError, match="rank 2 of its machine"):
        device_of("6,7", 0, 2)


def test_more_ranks_than_rows_are_refused() -> None:
    require_rows(2, 2)
    with pytest.raises(UserError, match="rows.rows_per_step = 1 with 2 ranks"):
        require_rows(1, 2)


def test_a_port_that_is_taken_is_named_and_nobody_called_lost(
    children: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=has_both) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        rank = Rank(number=0, count=2, has_address=True)
        with pytest.raises(UserError, match=f"rank 0 cannot listen at MASTER_PORT = {port}: .*EADDRINUSE") as caught:
            run_all([Job(rank.name, children.sum_up, (rank,))], stall_s=300.0, on_message=lambda *_: None)
    assert len(str(caught.value).splitlines()) == 3
