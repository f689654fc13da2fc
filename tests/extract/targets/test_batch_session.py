"""Several texts in one cache: equal to forwards over each text alone, whatever is rolled back in which row."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.batch_session import BatchSession, relative_error
from dflash_offline.extract.targets.hf import HfTarget
from target_families import VERIFIED

DENSE = ["t16-tied", "llama", "granite"]
WINDOWED = ["qwen3-windows", "mistral", "phi3", "gemma2", "gemma3", "olmo3"]  # windows of 8
MOE = ["qwen3-moe", "gpt-oss", "deepseek-v3", "llama4"]
TAPS = (2, 0)


def uncached(target: HfTarget, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, V] and taps [S, Lt*H] of one forward over all ids, by hidden_states."""
    with torch.no_grad():
        out = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.logits[0].float(), torch.cat([out.hidden_states[layer + 1][0] for layer in TAPS], dim=-1)


def random_ids(chooser: random.Random, count: int) -> list[int]:
    return [chooser.randrange(6, 262) for _ in range(count)]


class Walk:
    """Texts that grow and shrink at random in one batch session; every forward is compared."""

    def __init__(self, target: HfTarget, seed: int) -> None:
        self.target, self.chooser = target, random.Random(seed)
        self.batch = target.open_batch(TAPS)
        self.texts: dict[int, list[int]] = {}

    def begin(self, number: int, length: int) -> None:
        self.texts[number] = random_ids(self.chooser, length)
        session = self.target.open(TAPS)
        session.forward(torch.tensor(self.texts[number]))
        self.batch.add(number, session)

    def end(self, number: int) -> None:
        del self.texts[number]
        self.batch.close(number)

    def forward(self) -> None:
        numbers = self.chooser.sample(sorted(self.texts), len(self.texts))  # any order
        starts = [self.kept(self.texts[number]) for number in numbers]
        new = [random_ids(self.chooser, self.chooser.randint(1, 5)) for _ in numbers]
        results = self.batch.forward(numbers, starts, [torch.tensor(ids) for ids in new])
        for number, start, ids, (logits, taps) in zip(numbers, starts, new, results, strict=True):
            self.texts[number] = self.texts[number][:start] + ids
            expected_logits, expected_taps = uncached(self.target, self.texts[number])
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, expected_logits[start:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(taps, expected_taps[start:], rtol=1e-4, atol=1e-4)

    def kept(self, text: list[int]) -> int:
        return self.chooser.choice([len(text), len(text), max(1, len(text) - self.chooser.randint(1, 6))])


@pytest.mark.parametrize("name", [*DENSE, *WINDOWED, *MOE])
def test_texts_of_a_batch_do_not_see_each_other_nor_what_was_rolled_back(loaded: Any, name: str) -> None:
    """Texts of 2 to 40 tokens, around the windows of 8; some end, others begin."""
    walk = Walk(loaded(name), 3)
    for number, length in enumerate((7, 20, 2)):
        walk.begin(number, length)
    for number in range(3, 7):
        for _ in range(3):
            walk.forward()
        walk.end(walk.chooser.choice(sorted(walk.texts)))
        walk.begin(number, walk.chooser.randint(2, 25))
    assert max(map(len, walk.texts.values())) > 16


def can_batch(name: str) -> bool:
    return not VERIFIED[name].is_recurrent and not VERIFIED[name].fields.get("index_topk")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VERIFIED if can_batch(name)])
def test_every_family_with_a_plain_cache_can_be_batched(loaded: Any, name: str) -> None:
    walk = Walk(loaded(name), 5)
    for number, length in enumerate((7, 20, 2)):
        walk.begin(number, length)
    for _ in range(6):
        walk.forward()


@pytest.mark.parametrize("name, reason", [("t19-hybrid", "recurrent target"), ("glm-moe-dsa", "DynamicIndexedLayer")])
def test_some_targets_take_one_text_at_a_time_and_say_why(loaded: Any, name: str, reason: str) -> None:
    assert reason in str(loaded(name).single_reason)


def test_angles_that_follow_the_longest_text_cannot_be_batched(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded("t16-tied")
    assert target.single_reason is None
    scaled = HfTarget(target.model, None, replace(target.facts, rope={"rope_type": "longrope"}), "cpu")
    assert "longrope" in str(scaled.single_reason)


def test_attention_that_is_scaled_by_the_cache_cannot_be_batched(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 counts the places of its unrotated layers in the cache, where a short text begins late."""
    target = loaded("llama4")
    config = target.model.config
    assert (config.attn_temperature_tuning, target.single_reason) == (True, None)
    assert config.floor_scale > target.facts.max_positions, "no place is far enough to be scaled"
    layer = target.decoder.layers[-1].self_attn
    monkeypatch.setattr(layer, "use_rope", False)
    monkeypatch.setattr(layer, "floor_scale", 4)
    texts = [torch.arange(7) + 20, torch.arange(30) + 40]
    batch = BatchSession(target, TAPS)
    for number, text in enumerate(texts):
        session = target.open(TAPS)
        session.forward(text[:-1])
        batch.add(number, session)
    results = batch.forward([0, 1], [6, 29], [text[-1:] for text in texts])
    short, long = (
        relative_error(logits, uncached(target, text.tolist())[0][-1:]) for (logits, _), text in zip(results, texts)
    )
    assert long < 1e-5
    assert short > 1e-4, "the place in the longest text was used"
    monkeypatch.setattr(config, "floor_scale", 4)
    assert target.single_reason == "attention is scaled by places in the longest text"


class Unmoved(BatchSession):
    """Cuts the cache where its longest text ends: refused drafts of the others stay, and their own tokens go."""

    def cut(self, order: Any, starts: Any) -> None:
        self.move(lambda states: states[list(order)][:, :, : max(starts)])
        self.firsts = [0 for _ in order]


def test_a_batch_that_is_rolled_back_wrongly_is_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded("t16-tied")
    monkeypatch.setattr(target, "has_right_batch", False)
    target.open_batch(TAPS)
    monkeypatch.setattr(target, "has_right_batch", False)
    monkeypatch.setattr("dflash_offline.extract.targets.batch_session.BatchSession", Unmoved)
    with pytest.raises(UserError, match="decodes a batch wrongly: relative error") as caught:
        target.open_batch(TAPS)
    assert "batch=1" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_a_model_without_the_arguments_of_a_batch_is_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded("t16-tied")
    whole = target.model.forward

    def forward(input_ids: Any, cache: Any = None, use_cache: bool = True) -> Any:
        return whole(input_ids=input_ids, cache=cache, use_cache=use_cache)

    monkeypatch.setattr(target.model, "forward", forward)
    monkeypatch.setattr(target, "has_right_batch", False)
    with pytest.raises(UserError, match="cannot decode a batch: TypeError"):
        target.open_batch(TAPS)
