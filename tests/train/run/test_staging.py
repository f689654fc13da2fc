"""Rows staged one ahead are the loader's rows: the same buffers, the same order, every slot given back."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.store.reader import StoreReader
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.checkpoint import list_steps
from dflash_offline.train.clock import StepClock
from dflash_offline.train.config import DrafterConfig
from dflash_offline.train.loader import Loader, LoaderPlan
from dflash_offline.train.noise import TapNoise
from dflash_offline.train.order import ALL, Place
from dflash_offline.train.slot import RowShape, RowSlot
from dflash_offline.train.spec import make_spec
from dflash_offline.train.staging import Lanes, Mark, Staged, tensors_in
from dflash_offline.train.worker import train

CPU = torch.device("cpu")
SHAPE = RowShape(row_tokens=128, anchors=16, block_size=8)
NUM_ROWS = 12


@pytest.fixture(scope="module", params=["raw", "int8:4"])
def plan(request, lab, tmp_path_factory) -> LoaderPlan:
    store = lab.make_store(tmp_path_factory.mktemp("staged"), codec=request.param, has_last=True)
    return LoaderPlan(
        store_dir=store,
        segments=ALL,
        snapshot=StoreReader(store).snapshot,
        taps=(0, 1, 2),
        slot=RowSlot(shape=SHAPE, num_taps=3, hidden_size=32, codec_name=request.param, has_last=True),
        seed=3,
        shuffle_segments=4,
        start=Place(0, 0),
        num_rows=NUM_ROWS,
    )


def opened(plan: LoaderPlan, slots: int = 3) -> Loader:
    return Loader(plan, slots=slots, stall_s=300.0, beat=lambda: None)


def batch_for(plan: LoaderPlan, device: torch.device = CPU) -> RowBatch:
    target = StoreReader(plan.store_dir).manifest.target
    spec = make_spec(DrafterConfig(num_layers=1, block_size=8), target, (0, 2, 3))
    return RowBatch(spec, SHAPE, device, torch.float32, has_last=True)


def buffers(batch: RowBatch) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*batch.buffers(), batch.ids, batch.loss_mask, batch.keep, batch.starts)]


def straight(plan: LoaderPlan) -> list[tuple[Any, list[torch.Tensor]]]:
    """Every row loaded from its slot, nothing ahead."""
    batch, found = batch_for(plan), []
    with opened(plan) as loader:
        for _ in range(NUM_ROWS):
            with loader.row() as row:
                batch.load(row.arrays)
                found.append((row, buffers(batch)))
    return found


def staged(
    plan: LoaderPlan, slots: int, noise: TapNoise | None = None, device: torch.device = CPU, has_graph: bool = False
) -> list[tuple[Any, list[torch.Tensor]]]:
    batch, found = batch_for(plan, device), []
    with opened(plan, slots) as loader:
        rows = Staged(
            loader,
            device,
            StepClock(device),
            noise=noise,
            graph_pool=torch.cuda.graph_pool_handle() if has_graph else None,
        )
        for number in range(NUM_ROWS):
            row = rows.load(batch)
            before = buffers(batch)
            if number % 3:  # staging is a head start, not a duty
                rows.stage(batch)
            assert all(torch.equal(a, b) for a, b in zip(before, buffers(batch))), "a row in use was written"
            found.append((row, before))
        rows.stage(batch)  # no row is left
        assert rows.num_left == 0
        assert rows.ahead is None
        assert (0 if rows.replay is None else rows.replay.num_replays) == (NUM_ROWS - 2 if has_graph else 0)
    return found


@pytest.mark.parametrize("slots", [2, 3])
def test_staged_rows_are_the_loader_s(plan, slots):
    for (row, expected), (ahead, found) in zip(straight(plan), staged(plan, slots), strict=True):
        assert (ahead.place, ahead.counts, ahead.after) == (row.place, row.counts, row.after)
        np.testing.assert_array_equal(ahead.sample_ids, row.sample_ids)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert ahead.flops > 0
        assert 0 <= ahead.num_ready <= slots


@pytest.mark.gpu
def test_a_graph_fills_a_batch_as_its_launches_do(plan):
    """Bit for bit, as a batch on the CPU has it but for the masks, which are tiles on CUDA."""
    cuda = torch.device("cuda")
    on_host, launched, replayed = straight(plan), staged(plan, 3, None, cuda), staged(plan, 3, None, cuda, True)
    for (_, host), (_, first), (_, second) in zip(on_host, launched, replayed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        by_name = zip(host[:8], second[:8])  # taps to last
        assert all(torch.equal(a, b.cpu()) for a, b in by_name)


def test_a_staged_slot_is_one_copy_of_every_array(plan):
    memory = np.random.default_rng(0).integers(0, 2, plan.slot.size_bytes).astype(np.uint8)
    arrays, tensors = plan.slot.view(memory), tensors_in(plan.slot, torch.from_numpy(memory.copy()))
    for name, _, _ in plan.slot.fields():
        np.testing.assert_array_equal(getattr(tensors, name).numpy(), getattr(arrays, name))


class SlowCopy(Mark):
    """A copy whose end is settled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits, self.done = 0, False

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.num_waits += not self.done


class SlowDevice(Lanes):
    """A device in no hurry, as the host sees it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.copies: list[SlowCopy] = []

    def copy(self, host, staging) -> Mark:
        super().copy(host, staging)
        self.copies.append(SlowCopy())
        return self.copies[-1]


def test_a_slot_comes_back_when_its_copy_is_done_and_the_host_waits_only_for_a_full_ring(plan):
    """Three slots, copies that never seem to end: the fourth row waits for the first copy, no earlier one does."""
    batch, device = batch_for(plan), SlowDevice()
    with opened(plan) as loader:
        rows = Staged(loader, CPU, StepClock(CPU))
        rows.lanes = device
        for _ in range(3):
            rows.load(batch)
        assert [copy.num_waits for copy in device.copies] == [0, 0, 0]
        assert len(rows.out) == 3
        rows.stage(batch)
        assert [copy.num_waits for copy in device.copies] == [1, 0, 0, 0]
        assert len(rows.out) == 3
        for copy in device.copies[:3]:
            copy.done = True
        rows.load(batch)
        rows.stage(batch)
        assert len(rows.out) == 2
        assert sum(copy.num_waits for copy in device.copies) == 1


@pytest.mark.parametrize("width", [0.25, 4.0])
def test_noise_is_uniform_and_a_function_of_seed_epoch_and_row(plan, width):
    clean = [tensors[0] for _, tensors in staged(plan, 3)]
    noisy = [tensors[0] for _, tensors in staged(plan, 3, TapNoise(width, 5, CPU))]
    again = [tensors[0] for _, tensors in staged(plan, 3, TapNoise(width, 5, CPU))]
    other = [tensors[0] for _, tensors in staged(plan, 3, TapNoise(width, 6, CPU))]
    added = torch.stack([b.double() - a.double() for a, b in zip(clean, noisy)])  # [rows, T, Lt*H]
    assert all(torch.equal(a, b) for a, b in zip(noisy, again))
    assert not any(torch.equal(a, b) for a, b in zip(noisy, other))
    assert len({float(row.sum()) for row in added}) == NUM_ROWS, "rows share their noise"
    assert 0.99 * width < float(added.max()) <= width * (1 + 1e-5)
    assert 0.99 * width < float(-added.min()) <= width * (1 + 1e-5)
    assert abs(float(added.mean())) < 0.01 * width
    assert float(added.std()) == pytest.approx(width / 3**0.5, rel=0.01)


def test_noise_of_a_row_does_not_depend_on_the_rows_before_it(plan):
    noise = TapNoise(1.0, -7, CPU)
    one, other = torch.zeros(2500, 6), torch.zeros(2500, 6)
    noise.add(one, Place(1, 4))
    noise.add(other, Place(1, 5))
    assert not torch.equal(one, other)
    again = torch.zeros(2500, 6)
    TapNoise(1.0, -7, CPU).add(again, Place(1, 4))
    assert torch.equal(one, again)
    half = torch.ones(2500, 6, dtype=torch.bfloat16)
    noise.add(half, Place(1, 4))
    assert torch.equal(half, (1 + one).bfloat16())


def test_a_noisy_run_resumes_to_the_same_bits_and_its_exams_see_no_noise(lab, tiny_store, tmp_path, reference_run):
    config = lab.make_config(tiny_store, tmp_path / "run", "noise=0.5", "keep=9")
    train(config)
    whole = tmp_path / "run"
    quiet, noisy = (lab.metrics_of(run, "train")[0]["loss"] for run in (reference_run, whole))
    assert quiet != noisy
    first = [lab.metrics_of(run, "exam")[0] for run in (reference_run, whole)]
    assert {**first[0], "exam_s": 0} == {**first[1], "exam_s": 0}
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    (resumed / "report.json").unlink()
    for step in list_steps(resumed):
        if step > 6:
            shutil.rmtree(resumed / f"checkpoints/step-{step:08d}")
    train(replace(config, out=str(resumed)))
    lab.same_checkpoint(resumed / "checkpoints/step-00000012", whole / "checkpoints/step-00000012")
    with pytest.raises(UserError, match="noise was 0.5 and is now 0.25"):
        train(replace(config, noise=0.25))
