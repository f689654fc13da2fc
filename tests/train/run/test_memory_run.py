"""What a run chose for the memory of its card: recorded when it starts, kept when it is resumed."""

import dataclasses
import json
import math
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.settings import resolve
from dflash_offline.train.config import CHUNK_BLOCKS, TrainConfig
from dflash_offline.train.facts import read_facts
from dflash_offline.train.loop import Trainer
from dflash_offline.train.memory_choice import CONTEXT_BYTES, LOST_SHARE, chunk_sizes, room_bytes
from dflash_offline.train.run import Run, check_run, write_run
from dflash_offline.train.start import run_trainer
from dflash_offline.watch import Channel

LARGE = 80 * 10**9


def check(config: TrainConfig, card_bytes: int | None = LARGE) -> Run:
    return check_run(config, lambda: "cpu" if card_bytes is None else "cuda", card_bytes)


def card_with(room: int) -> int:
    """The smallest card that leaves tensors this much."""
    card = math.ceil((room + CONTEXT_BYTES) / (1.0 - LOST_SHARE))
    assert 0 <= room_bytes(card) - room <= 2
    return card


def started(config: TrainConfig, card_bytes: int | None = LARGE) -> Run:
    run = check(config, card_bytes)
    run.run_dir.mkdir()
    write_run(run)
    return run


@pytest.fixture
def open_config(lab, tiny_store, tmp_path) -> TrainConfig:
    """A run whose memory is the package's choice, of rows and layers that are enough to leave one."""
    shape = ("drafter.head_dim=16", "rows.row_tokens=4096", "drafter.num_layers=4", "rows.anchors=2048")
    return lab.make_config(tiny_store, tmp_path / "run", *shape, "dtype=bfloat16", "cuda_graph=off")


def test_a_run_on_a_card_takes_what_is_fastest_and_says_so_in_its_files(open_config):
    run = started(open_config)
    assert run.choice is not None
    facts = read_facts(run.run_dir)
    assert (facts.chunk_blocks, facts.is_checkpointed) == (chunk_sizes(facts.shape)[0], False)
    repeated = resolve(TrainConfig, name="train", file=run.run_dir / "train.toml")
    assert (repeated.loss.chunk_blocks, repeated.checkpointing) == (facts.chunk_blocks, "off")
    assert check(repeated).facts == dataclasses.replace(facts, config_digest=check(repeated).facts.config_digest)


def test_a_resumed_run_keeps_its_choice_on_a_larger_card(open_config):
    large = check(open_config).choice
    assert large is not None
    small = started(open_config, card_with(large.plan.peak_bytes - 1))
    chosen = (small.facts.chunk_blocks, small.facts.is_checkpointed)
    assert chosen != (large.chunk_blocks, large.is_checkpointed)
    resumed = check(open_config)
    assert not resumed.is_new
    assert (resumed.facts.chunk_blocks, resumed.facts.is_checkpointed) == chosen


def test_a_resumed_run_does_not_choose_again_on_a_smaller_card(open_config):
    """It is refused, with a setting that lets it go on."""
    choice = started(open_config).choice
    assert choice is not None
    card = card_with(choice.plan.peak_bytes - 1)
    with pytest.raises(UserError, match="loss.chunk_blocks|checkpointing=on") as caught:
        check(open_config, card)
    name, value = str(caught.value).rpartition("--set ")[2].split("=")
    changed = open_config
    if name == "checkpointing":
        changed = dataclasses.replace(open_config, checkpointing=value)
    else:
        changed = dataclasses.replace(open_config, loss=dataclasses.replace(open_config.loss, chunk_blocks=int(value)))
    assert not check(changed, card).is_new


def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(open_config):
    with pytest.raises(UserError, match="the run needs .* GiB of device memory") as caught:
        check(open_config, CONTEXT_BYTES + 10**8)
    assert len(str(caught.value).splitlines()) == 3
    assert not Path(open_config.out).exists()


def test_on_a_cpu_nothing_is_planned(open_config):
    run = started(open_config, None)
    assert run.choice is None
    assert (run.facts.chunk_blocks, run.facts.is_checkpointed) == (CHUNK_BLOCKS, False)


def test_settings_win_over_what_the_run_has_and_are_recorded(lab, tiny_store, tmp_path):
    config = lab.make_config(tiny_store, tmp_path / "run")
    started(config, None)
    run = check(lab.make_config(tiny_store, tmp_path / "run", "loss.chunk_blocks=4", "checkpointing=on"), None)
    assert not run.is_new
    write_run(run)
    facts = check(config, None).facts
    assert (facts.chunk_blocks, facts.is_checkpointed) == (4, True)


def test_a_run_of_a_version_that_did_not_record_them_had_the_old_values(lab, tiny_store, tmp_path):
    config = lab.make_config(tiny_store, tmp_path / "run")
    run = started(config, None)
    path = run.run_dir / "run.json"
    facts = json.loads(path.read_text())
    del facts["chunk_blocks"], facts["is_checkpointed"]
    path.write_text(json.dumps(facts))
    assert (read_facts(run.run_dir).chunk_blocks, read_facts(run.run_dir).is_checkpointed) == (64, False)
    assert not check(config, None).is_new


def test_the_trainer_uses_what_the_facts_say(lab, tiny_store, tmp_path):
    config = lab.make_config(tiny_store, tmp_path / "run")
    started(lab.make_config(tiny_store, tmp_path / "run", "loss.chunk_blocks=4", "checkpointing=on"), None)
    _, theirs = Pipe()
    trainer = Trainer(check(config, None), torch.device("cpu"), Channel(theirs, "trainer"))
    assert trainer.step.config.chunk_blocks == 4
    assert trainer.drafter.is_checkpointed


def notes_of(config: TrainConfig) -> list[str]:
    """What the trainer says when it starts."""
    ours, theirs = Pipe()
    run_trainer(Channel(theirs, "trainer"), config)
    theirs.close()
    messages = []
    while ours.poll():
        try:
            messages.append(ours.recv())
        except EOFError:
            break
    return [note for message in messages for note in find_notes(message)]


def find_notes(message) -> list[str]:
    """The notes of a start, wherever the channel has put them."""
    if isinstance(message, dict):
        return message.get("notes", [])
    return [note for part in message for note in find_notes(part)] if isinstance(message, (tuple, list)) else []


def test_a_cpu_run_says_nothing_of_device_memory(lab, tiny_store, tmp_path):
    notes = notes_of(lab.make_config(tiny_store, tmp_path / "run", "steps=0", "eval_samples=1"))
    assert notes
    assert not [note for note in notes if "device memory" in note]


@pytest.mark.gpu
def test_a_cuda_run_shows_its_plan(lab, tiny_store, tmp_path):
    """Needs a device with memory of its own."""
    torch._dynamo.reset()  # of frames that other tests have compiled in this process
    settings = ("drafter.head_dim=16", "steps=0", "eval_samples=1", "devices=cuda")
    notes = notes_of(lab.make_config(tiny_store, tmp_path / "run", *settings))
    assert [note for note in notes if note.startswith("device memory, predicted: ")]
