"""Which assistant turns are answers to train on: those that a server would have asked for, and that were ended."""

from collections import Counter
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer, Rendered
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat

BRACKETS = (
    "{%- for m in messages -%}"
    "{{- ' ' + m.content + '<|im_end|>' if m.role == 'assistant' else '[' + m.content + ']' -}}"
    "{%- endfor -%}"
)
"""As Mistral's first ones: no generation prompt, an answer follows its question."""
HEADERS = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
"""ChatML that knows no add_generation_prompt."""


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def rendered(renderer: ChatRenderer, *messages: dict[str, Any]) -> Rendered:
    return renderer.render(Chat(list(messages), None))


def trained(renderer: ChatRenderer, *messages: dict[str, Any]) -> list[str]:
    """The answers that are trained on, as text."""
    found = []
    for sample in rendered(renderer, *messages).samples:
        starts = [i for i in range(len(sample.ids)) if sample.mask[i] and not (i and sample.mask[i - 1])]
        found += [renderer.encoder.decode(sample.ids[start:end]) for start, end in zip(starts, sample.ends)]
    return found


def fault_of(renderer: ChatRenderer, *messages: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(LeftOut) as caught:
        rendered(renderer, *messages)
    return caught.value.reason, caught.value.detail


@pytest.fixture
def plain(text_side: Any) -> ChatRenderer:
    return ChatRenderer(text_side("plain"), {})


def test_a_greeting_under_system_messages_answers_nothing(plain: ChatRenderer) -> None:
    greeting = [said("system", "s"), said("developer", "d"), said("assistant", "Hello."), said("assistant", "Hm?")]
    assert fault_of(plain, *greeting)[0] == "no question"
    found = rendered(plain, *greeting, said("user", "q"), said("assistant", "a"))
    assert found.left_out == Counter({"no question": 2})
    assert [number for number, _ in found.turns_left_out] == [1, 2]
    assert sum(found.samples[0].mask) == len("a") + 1


def test_an_answer_after_an_answer_needs_a_generation_prompt(text_side: Any, plain: ChatRenderer) -> None:
    chat = [said("user", "q"), said("assistant", "one"), said("assistant", "two")]
    assert trained(plain, *chat) == ["one<|im_end|>", "two<|im_end|>"]
    brackets = ChatRenderer(text_side(BRACKETS), {})
    assert trained(brackets, *chat) == [" one<|im_end|>"]
    assert rendered(brackets, *chat).left_out == Counter({"no question": 1})
    assert trained(brackets, *chat, said("user", "r"), said("assistant", "three")) == [
        " one<|im_end|>",
        " three<|im_end|>",
    ]


def test_a_template_that_opens_answers_but_no_prompt(text_side: Any) -> None:
    """Its header is no part of an answer, and a server that sends none is not asked as the template trains."""
    chat = [said("user", "q"), said("assistant", "a")]
    renderer = ChatRenderer(text_side(HEADERS), {})
    assert fault_of(renderer, *chat) == (
        "template writes no generation prompt",
        "it opens answers with '<|im_start|>assistant\\n'",
    )
    with pytest.raises(LeftOut, match="no generation prompt"):
        renderer.question(Chat(chat, None))
    thinking = HEADERS.replace("m.content", "('<think></think>' if m.role == 'assistant' else '') + m.content")
    assert fault_of(ChatRenderer(text_side(thinking), {}), *chat)[0] == "template writes no generation prompt"
    assert trained(ChatRenderer(text_side(BRACKETS), {}), *chat) == [" a<|im_end|>"]


def test_the_header_of_a_template_that_opens_thoughts_in_the_prompt_alone(text_side: Any) -> None:
    """Where its prompt is without one, as after a tool's result, the answer that brings the header is left out."""
    template = HEADERS.replace("{%- endfor -%}", "") + (
        "{%- endfor -%}{{- '<|im_start|>assistant\\n<think>' "
        "if add_generation_prompt and messages[-1].role == 'user' -}}"
    )
    renderer = ChatRenderer(text_side(template), {})
    chat = [said("user", "q"), said("assistant", "<think>hm</think>a"), said("tool", "1"), said("assistant", "b")]
    assert trained(renderer, *chat) == ["hm</think>a<|im_end|>"]
    assert rendered(renderer, *chat).left_out == Counter({"not what the generation prompt asks for": 1})


@pytest.mark.parametrize("key", ["weight", "train"])
def test_weights(plain: ChatRenderer, key: str) -> None:
    last = [said("user", "r"), said("assistant", "b")]
    for weight in (1, 1.0, True, None):
        assert len(trained(plain, said("user", "q"), said("assistant", "a", **{key: weight}), *last)) == 2
    for weight in (0, 0.0, False):
        found = rendered(plain, said("user", "q"), said("assistant", "a", **{key: weight}), *last)
        assert found.left_out == Counter({"weight 0": 1}), weight
    for weight in ("0", "1", "", -1, 0.5, 2, [], [1], {}, float("nan")):
        found = rendered(plain, said("user", "q"), said("assistant", "a", **{key: weight}), *last)
        assert found.left_out == Counter({"unknown weight": 1}), weight
    assert fault_of(plain, said("user", "q"), said("assistant", "a", **{key: "0"})) == (
        "unknown weight",
        f"{key} is '0', expected 0 or 1",
    )


def test_two_weights(plain: ChatRenderer) -> None:
    assert fault_of(plain, said("user", "q"), said("assistant", "a", weight=1, train=False))[0] == "shapes disagree"
    assert fault_of(plain, said("user", "q"), said("assistant", "a", weight=0, train=False))[0] == "weight 0"
    assert trained(plain, said("user", "q"), said("assistant", "a", weight=1.0, train=True)) == ["a<|im_end|>"]


@pytest.mark.parametrize("key", ["finish_reason", "stop_reason"])
def test_the_end_of_an_answer_that_a_limit_cut_is_not_trained_on(plain: ChatRenderer, key: str) -> None:
    for reason in ("length", "max_tokens", "MAX_TOKENS", "max_output_tokens"):
        assert trained(plain, said("user", "q"), said("assistant", "a", **{key: reason})) == ["a"], reason
    for reason in ("stop", "STOP", "end_turn", "eos", "tool_calls", "stop_sequence", None):
        assert trained(plain, said("user", "q"), said("assistant", "a", **{key: reason})) == ["a<|im_end|>"], reason
    for reason in ("content_filter", "abort", "error", "", 151645, True, ["stop"]):
        fault = fault_of(plain, said("user", "q"), said("assistant", "a", **{key: reason}))
        assert fault == ("unknown finish reason", f"{key} is {reason!r}")


def test_two_words_about_one_ending(plain: ChatRenderer) -> None:
    both = said("assistant", "a", finish_reason="length", stop_reason="max_tokens")
    assert trained(plain, said("user", "q"), both) == ["a"]
    assert fault_of(plain, said("user", "q"), both | {"stop_reason": "end_turn"})[0] == "shapes disagree"
    assert fault_of(plain, said("user", "q"), both | {"stop_reason": "abort"})[0] == "shapes disagree"


def test_thoughts_that_the_template_does_not_write_are_counted(text_side: Any) -> None:
    chat = [
        said("user", "q"),
        said("assistant", "a", reasoning_content="hm"),
        said("user", "r"),
        said("assistant", "b"),
    ]
    found = rendered(ChatRenderer(text_side("plain"), {}), *chat)
    assert found.noted == Counter({"thoughts_unwritten": 1})
    assert not found.left_out
    assert not rendered(ChatRenderer(text_side("drops-old-thoughts"), {}), *chat).noted


@pytest.mark.parametrize(("closing", "number"), [("\\n", 2), ("</think>\\n", 0), ("<|im_end|>", 0)])
def test_answers_without_an_end_mark_are_counted(text_side: Any, closing: str, number: int) -> None:
    template = text_side("plain").tokenizer.chat_template.replace("<|im_end|>\\n", closing)
    renderer = ChatRenderer(text_side(template), {})
    chat = [said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "b")]
    assert rendered(renderer, *chat).noted["answers_without_end"] == number
    chat[1]["finish_reason"] = "length"
    assert rendered(renderer, *chat).noted["answers_without_end"] == max(number - 1, 0)
