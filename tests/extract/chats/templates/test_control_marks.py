"""Control marks that an answer's own words hold are not trained on; those that a template writes are."""

from collections import Counter
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat

REASON = "control mark inside the answer"
TYPED = {
    "qwen3": "<|im_start|>",
    "llama3_1": "<|python_tag|>",
    "gemma3": "<start_of_turn>",
    "gptoss": "<|channel|>",
    "glm4_5": "<|assistant|>",
    "mistral_v3": "[TOOL_CALLS]",
    "deepseek_r1": "<\uff5cUser\uff5c>",
}


def renderer_of(families: Any, family: str) -> ChatRenderer:
    side = families.side_of(family, families.our_template(family))
    return ChatRenderer(side, {}, now=families.TODAY)


def with_call(families: Any, **function: Any) -> dict[str, Any]:
    return families.CALL | {"function": families.CALL["function"] | function}


def reason_of(renderer: ChatRenderer, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str | None:
    try:
        renderer.render(Chat(messages, tools))
    except LeftOut as fault:
        return fault.reason
    return None


@pytest.mark.parametrize("family", TYPED)
def test_a_mark_typed_in_the_content(families: Any, family: str) -> None:
    """Wherever it stands; the turn after it is trained on."""
    renderer, mark = renderer_of(families, family), TYPED[family]
    said = families.said
    thought = "<think>\nhm\n</think>\n\n" if family == "deepseek_r1" else ""
    for content in (f"{mark}Yo.", f"Yo {mark} yo.", f"Yo.{mark}"):
        messages = [said("user", "Mark?"), said("assistant", thought + content)]
        assert reason_of(renderer, messages) == REASON, content
        rendered = renderer.render(Chat([*messages, said("user", "And?"), said("assistant", thought + "So.")], None))
        assert rendered.left_out == Counter({REASON: 1})
        assert sum(map(sum, (sample.mask for sample in rendered.samples))) > 0
    assert reason_of(renderer, [said("user", f"Mark {mark}?"), said("assistant", thought + "Yo.")]) is None


@pytest.mark.parametrize("family", ["qwen3", "gptoss", "glm4_5"])
def test_a_mark_typed_in_the_thought(families: Any, family: str) -> None:
    messages = [families.said("user", "q"), families.said("assistant", "a", reasoning_content=f"h {TYPED[family]}")]
    assert reason_of(renderer_of(families, family), messages) == REASON


@pytest.mark.parametrize("family", ["qwen3", "gptoss", "mistral_v3"])
def test_a_mark_typed_in_the_arguments_of_a_call(families: Any, family: str) -> None:
    """The call's own marks, which the template writes, are trained on; typed, they are not."""
    renderer, said = renderer_of(families, family), families.said
    for text, reason in (("a", None), (f"a{TYPED[family]}", REASON)):
        call = with_call(families, arguments={"a": {"b": [text]}})
        messages = [said("user", "1+2?"), said("assistant", "", tool_calls=[call])]
        assert reason_of(renderer, messages, [families.ADD]) == reason, text


def test_marks_of_the_template_beside_a_typed_one_are_told_apart(families: Any) -> None:
    """Harmony writes <|channel|> and <|message|> in every answer; a content may not."""
    renderer, said = renderer_of(families, "gptoss"), families.said
    thoughtful = said("assistant", "Yes.", reasoning_content="9 is.")
    (sample,) = renderer.render(Chat([said("user", "Odd?"), thoughtful], None)).samples
    trained = renderer.encoder.decode([token for token, on in zip(sample.ids, sample.mask) if on])
    assert trained.count("<|channel|>") == trained.count("<|message|>") == 2
    whole = said("assistant", "<|channel|>analysis<|message|>9 is.<|end|><|start|>assistant<|message|>Yes.")
    assert reason_of(renderer, [said("user", "Odd?"), whole]) == REASON


def test_think_marks_of_a_thought_in_the_content_are_its_own(text_side: Any, chat: Any) -> None:
    """They are special tokens here, as in some tokenizers, and added ones without that name elsewhere."""
    assert reason_of(ChatRenderer(text_side("plain"), {}), chat("q", "<think>hm</think>Yes.")) is None


@pytest.mark.parametrize("thought", ["<think>\nhm\n</think>", "hm</think>", "say <think>"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm4_5"])
def test_think_marks_inside_a_thought_are_not(families: Any, family: str, thought: str) -> None:
    messages = [families.said("user", "q"), families.said("assistant", "Yes.", reasoning_content=thought)]
    assert reason_of(renderer_of(families, family), messages) == REASON


def test_a_second_thought_in_the_content_beside_the_first(families: Any) -> None:
    messages = [families.said("user", "q"), families.said("assistant", "<think>b</think>Yes.", reasoning_content="a")]
    assert reason_of(renderer_of(families, "qwen3"), messages) == REASON


def test_marks_that_are_no_special_tokens_are_words(families: Any) -> None:
    """As Qwen's tool calls that a data set has written into the content, the way the target writes them."""
    renderer = renderer_of(families, "qwen3")
    content = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert reason_of(renderer, [families.said("user", "q"), families.said("assistant", content)]) is None
