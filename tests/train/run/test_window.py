"""Training on stores recorded with a window: the same mathematics as on the whole store, or a refusal by name."""

import dataclasses
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.store.frozen import read_frozen
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader
from dflash_offline.train import start
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.order import Place, RowCounts, RowOrder, fill_row
from dflash_offline.train.run import Run, check_run, write_run
from dflash_offline.train.slot import RowArrays, RowShape, RowSlot
from dflash_offline.watch import Channel

WINDOW, HIDDEN = 16, 32
SHAPE = RowShape(row_tokens=128, anchors=96, block_size=8)  # every eligible anchor of a sample, the first among them


def check(config: TrainConfig) -> Run:
    return check_run(config, lambda: "cpu")


def train_inside(config: TrainConfig) -> Path:
    """The trainer in this process (its loader in one of its own); what it tells is dropped."""
    _ours, theirs = Pipe()
    start.run_trainer(Channel(theirs, "trainer"), config)
    return Path(config.out)


@pytest.fixture(scope="module")
def stores(lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same samples recorded whole and with a window, so long that one fills a row of 128 either way."""
    made = [
        lab.make_store(tmp_path_factory.mktemp(name), shortest=100, longest=127, num_train=12, window=window)
        for name, window in (("whole", None), ("cut", WINDOW))
    ]
    assert not verify(made[1]).faults or "frozen" in str(verify(made[1]).faults[0])
    return made[0], made[1]


def one_sample(store: Path, i: int, *, taps: tuple[int, ...] = (0, 1, 2)) -> tuple[RowArrays, RowCounts]:
    """A row of sample i alone."""
    with StoreReader(store) as reader:
        order = RowOrder.of(reader, np.array([i]), SHAPE, seed=0, shuffle_segments=1)
        row = RowSlot(shape=SHAPE, num_taps=len(taps), hidden_size=HIDDEN, codec_name="raw").allocate()
        return row, fill_row(reader, np.array([i]), taps, Place(0, 0), order, row)


def pairs(stores: tuple[Path, Path]) -> list[tuple[int, int, int]]:
    """Numbers of the same sample in both stores, and its first token in the second."""
    whole, cut = (StoreReader(store).samples for store in stores)
    numbers = {sample_id: i for i, sample_id in enumerate(whole.sample_id.tolist())}
    return [(numbers[s], i, first) for i, (s, first) in enumerate(zip(cut.sample_id.tolist(), cut.first.tolist()))]


def test_a_row_of_a_windowed_store_is_that_of_the_whole_one_from_its_first_token_on(stores) -> None:
    seen = 0
    for number, cut_number, first in pairs(stores):
        (whole, whole_counts), (cut, counts) = one_sample(stores[0], number), one_sample(stores[1], cut_number)
        length = counts.num_tokens
        assert whole_counts.num_tokens == first + length
        assert np.array_equal(cut.taps[:, :length], whole.taps[:, first : first + length])
        for name in ("ids", "loss_mask", "sample_ids", "positions"):
            left, right = getattr(cut, name), getattr(whole, name)
            assert np.array_equal(left[:length], right[first : first + length]), name
            assert (left[length:] == right[first + length :][: len(left) - length][:1]).all(), name
        assert not cut.taps[:, length - 1 :].any()
        assert np.array_equal(cut.anchors + first, whole.anchors)
        assert np.array_equal(cut.keep, whole.keep)
        seen += first > 0
    assert seen == len(pairs(stores))


@pytest.mark.parametrize("window", [1, 7, WINDOW])
def test_blocks_have_the_outputs_they_have_on_the_whole_store(lab, tmp_path, stores, window: int) -> None:
    """In float64, so that the order of a sum cannot hide a missing term; rotary angles are float32 on both sides."""
    settings = (f"drafter.window={window}", "rows.anchors=96")
    spec = check(lab.make_config(stores[1], tmp_path / "run", *settings)).facts.spec
    drafter = Drafter(spec)
    drafter.init_weights(0)
    drafter.double()
    embedding = read_frozen(stores[0]).embedding.double()

    def outputs(store: Path, i: int) -> tuple[torch.Tensor, ...]:
        batch = RowBatch(spec, SHAPE, torch.device("cpu"), torch.float64)
        batch.load(one_sample(store, i)[0])
        embeds = embedding[batch.block_ids]
        with torch.no_grad():
            hidden = drafter(batch.taps, embeds, batch.positions, batch.block_positions, batch.masks)
        return hidden, batch.labels * batch.valid.long(), batch.valid, batch.block_ids, batch.block_positions

    for number, cut_number, _ in pairs(stores)[:5]:
        whole, cut = outputs(stores[0], number), outputs(stores[1], cut_number)
        assert (whole[0] - cut[0]).abs().max() < 1e-12
        assert all(torch.equal(one, other) for one, other in zip(whole[1:], cut[1:]))


def test_a_drafter_that_looks_further_back_would_be_another(lab, tmp_path, stores) -> None:
    """The test above would see it: what lies before the window is read there and missing here."""
    facts = check(lab.make_config(stores[0], tmp_path / "run", f"drafter.window={WINDOW + 2}", "rows.anchors=96")).facts
    drafter = Drafter(facts.spec)
    drafter.init_weights(0)
    number, cut_number, _ = pairs(stores)[0]
    found = []
    for store, i in ((stores[0], number), (stores[1], cut_number)):
        batch = RowBatch(facts.spec, SHAPE, torch.device("cpu"), torch.float32)
        batch.load(one_sample(store, i)[0])
        embeds = read_frozen(store).embedding[batch.block_ids]
        with torch.no_grad():
            found.append(drafter(batch.taps, embeds, batch.positions, batch.block_positions, batch.masks))
    assert (found[0] - found[1]).abs().max() > 1e-4


@pytest.mark.parametrize("window", [5, WINDOW])
def test_a_run_has_the_same_losses_and_exams_on_either_store(lab, tmp_path, stores, window: int) -> None:
    """Within fp32's rounding, which differs by processor: its kernels cut rows of other lengths elsewhere."""
    settings = (f"drafter.window={window}", "steps=6", "eval_every=3")
    runs = [train_inside(lab.make_config(store, tmp_path / store.parent.name, *settings)) for store in stores]
    whole, cut = (lab.metrics_of(run, "train") for run in runs)
    for name in ("num_blocks", "weight", "num_samples"):
        assert [line[name] for line in whole] == [line[name] for line in cut]
    for name, rounding in (("loss", 3e-6), ("grad_norm", 3e-5)):
        assert [line[name] for line in cut] == pytest.approx([line[name] for line in whole], rel=rounding)
    assert sum(line["num_tokens"] for line in cut) < sum(line["num_tokens"] for line in whole)
    exams = [[{**line, "exam_s": 0} for line in lab.metrics_of(run, "exam")] for run in runs]
    assert exams[0] == exams[1]
    assert exams[0][0]["num_prompts"] > 0


@pytest.mark.parametrize(
    "settings, told",
    [
        (["drafter.window=none"], "the drafter's window is none: not all of its layers have one"),
        ([f"drafter.window={WINDOW + 1}"], f"the drafter's window is {WINDOW + 1}"),
        (
            [f"drafter.window={WINDOW}", "drafter.layer_types=sliding,full"],
            "the drafter's window is none: not all of its layers have one",
        ),
    ],
)
def test_a_drafter_that_would_read_what_is_not_stored_is_refused(lab, tmp_path, stores, settings, told) -> None:
    with pytest.raises(UserError) as caught:
        check(lab.make_config(stores[1], tmp_path / "run", *settings))
    assert f"was recorded with window {WINDOW}, " in caught.value.happened
    assert told in caught.value.happened
    assert f"--set drafter.window={WINDOW} or less" in caught.value.advice
    assert len(str(caught.value).splitlines()) == 3
    assert not check(lab.make_config(stores[0], tmp_path / "run", *settings)).facts.store["window"]


def test_the_window_is_part_of_a_run(lab, tmp_path, stores) -> None:
    config = lab.make_config(stores[1], tmp_path / "run", "drafter.window=9")
    (tmp_path / "run").mkdir()
    run = check(config)
    write_run(run)
    assert run.facts.spec.attention == (AttentionKind(9), AttentionKind(9))
    assert "window = 9" in (tmp_path / "run" / "train.toml").read_text()
    assert not check(config).is_new
    other = dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, window=8))
    with pytest.raises(UserError, match="drafter.attention was '2 x sliding 9' and is now '2 x sliding 8'"):
        check(other)
    with pytest.raises(UserError, match="window"):
        check(dataclasses.replace(config, store=str(stores[0])))
    with pytest.raises(UserError, match=r"drafter\.window = 0"):
        lab.make_config(stores[1], tmp_path / "run", "drafter.window=0")
