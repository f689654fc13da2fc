"""What is trained on, and after which ids, on random chats: against a reference that knows nothing of our code.

The reference asks transformers alone: for each answer the ids of the prompt a server would send, and the ids of the
chat up to that answer's end; what the second adds to the first, up to the first stop token, is what greedy decoding
after that prompt is scored on.
"""

import random
import re
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer, Sample
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat
from dflash_offline.extract.targets.facts import TextSide, read_text_side

Pair = tuple[list[int], list[int]]
WORDS = ["add", "3", "17", " ", "  ", "\n", "\n\n", "\t", "Yes.", "no", "{", "}", "'", '"', "\\n", "a" * 40]
WORDS += ["\u00e9", "e\u0301", "\u00df", "\u4f60\u597d", "\u05e9\u05dc", "\u200d", "\U0001f469\u200d\U0001f680"]
WORDS += ["\ufffd", "\u2028", "\x00", "\ufeff", "\u200b"]
UNSEEN = r"[\s\ufeff\u200b\u200c\u200d\u2060\0]"
MARKS = ["<|user|>", "<|assistant|>", "<|end|>", "<|end", "<|pad|>", "<|mask|>", "<|im_end|>", "<think>", "</think>"]


def random_text(rng: random.Random, marks: float) -> str:
    parts = [rng.choice(MARKS if rng.random() < marks else WORDS) for _ in range(rng.randrange(8))]
    return rng.choice(["", " "]).join(parts)


def random_chat(rng: random.Random) -> list[dict[str, Any]]:
    """Mostly question and answer in turn; some answers are empty, some users type control marks, few chats are odd."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.03:
        messages.append({"role": "system", "content": "The tiny targets know no such role."})
    for _ in range(rng.randrange(1, 6)):
        if rng.random() > 0.05:
            messages.append({"role": "user", "content": random_text(rng, marks=0.2)})
        if rng.random() > 0.05:
            messages.append({"role": "assistant", "content": random_text(rng, marks=0.03)})
    return messages


def is_thought_alone(content: str) -> bool:
    """As a reader sees it: nothing stands outside of thoughts. `UNSEEN` is not seen."""
    outside, inside = "", False
    for part in content.replace("<think>", "\r<think>\r").replace("</think>", "\r</think>\r").split("\r"):
        if part == "<think>" and not inside:
            inside = True
        elif part == "</think>" and inside:
            inside = False
        elif not inside:
            outside += part
    outside, content = (re.sub(UNSEEN, "", text) for text in (outside, content))
    return not outside or ("<think>" not in content and content.endswith("</think>"))


def holds_control_mark(side: TextSide, content: str) -> bool:
    """True where the words of an answer hold a special token, think marks aside."""
    ids = side.tokenizer(content, add_special_tokens=False)["input_ids"]
    special = set(side.tokenizer.convert_ids_to_tokens([token for token in ids if token in side.special_ids]))
    return bool(special - {"<think>", "</think>"})


def reference(side: TextSide, messages: list[dict[str, Any]]) -> list[Pair]:
    """Prompt and answer ids of every turn that can be trained on."""
    if any(message["role"] == "system" for message in messages):
        return []
    found: list[Pair] = []
    for turn, message in enumerate(messages):
        is_asked = any(before["role"] == "user" for before in messages[:turn])
        if message["role"] != "assistant" or not is_asked or is_thought_alone(message["content"]):
            continue
        if holds_control_mark(side, message["content"]):
            continue
        prompt = side.tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=False)
        whole = side.tokenizer.apply_chat_template(messages[: turn + 1], return_dict=False)
        assert whole[: len(prompt)] == prompt
        answer = whole[len(prompt) :]
        stop = next(i for i, token in enumerate(answer) if token in side.eos_ids)
        assert stop == len(answer) - 1
        found.append((prompt, answer))
    return found


def trained(samples: list[Sample]) -> list[Pair]:
    """Every run of trained ids with all ids before it."""
    found: list[Pair] = []
    for sample in samples:
        edges = [i for i in range(1, len(sample.ids)) if sample.mask[i] != sample.mask[i - 1]] + [len(sample.ids)]
        assert not sample.mask[0]
        assert sample.mask[-1]
        assert edges[1::2] == sample.ends
        found += [(sample.ids[:start], sample.ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2])]
    return found


@pytest.mark.parametrize(("target", "num_chats"), [("tiny", 1000), ("tiny-hybrid", 200)])
def test_supervised_ids_are_what_decoding_after_the_prompt_is_scored_on(target: str, num_chats: int) -> None:
    side = read_text_side(target)
    renderers = {turns: ChatRenderer(side, {}, turns) for turns in ("auto", "each", "last")}
    rng = random.Random(target)
    num_answers = num_left_out = num_shared = 0
    for _ in range(num_chats):
        messages = random_chat(rng)
        if not messages:
            continue
        expected = reference(side, messages)
        for turns, renderer in renderers.items():
            try:
                samples = renderer.render(Chat(messages, None)).samples
            except LeftOut:
                samples = []
            wanted = expected[-1:] if turns == "last" else expected
            assert trained(samples) == wanted, (turns, messages)
            if turns != "auto":
                assert len(samples) == len(wanted)
            else:
                num_shared += len(wanted) > len(samples) > 0
        num_answers += len(expected)
        num_left_out += not expected
    assert num_answers > num_chats
    assert num_shared > num_chats / 4
    assert num_left_out > num_chats / 50
