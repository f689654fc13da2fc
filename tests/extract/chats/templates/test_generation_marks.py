"""Generation tags of templates against our rule: what may differ, and what leaves a turn out by name."""

from collections import Counter
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"
HEADER, END = "<|im_start|>assistant\n", "<|im_end|>\n"
THOUGHT = "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}"
CONTENT = "{{ m.content }}"
BEFORE = (
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '"
    "<|im_end|>\\n' }}{% else %}"
)
AFTER = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

# How real templates place their tags; each says the same as our rule.
AGREEING = {
    "the answer and its end": [HEADER, OPEN, CONTENT, "{{ '<|im_end|>' }}", CLOSE, "{{ '\n' }}"],
    "the trailing newline too": [HEADER, OPEN, CONTENT, "{{ '<|im_end|>\n' }}", CLOSE],
    "the answer alone": [HEADER, OPEN, CONTENT, CLOSE, "{{ '<|im_end|>\n' }}"],
    "the header too": [OPEN, HEADER, CONTENT, "{{ '<|im_end|>\n' }}", CLOSE],
    "in pieces": [HEADER, OPEN, CONTENT, CLOSE, OPEN, "{{ '<|im_end|>\n' }}", CLOSE],
    "with the thought": [HEADER, OPEN, THOUGHT, CONTENT, CLOSE, "{{ '<|im_end|>\n' }}"],
    "the thought's marks left out": [
        HEADER + "{{ '<think>\n' }}" + OPEN + "{{ m.reasoning_content or '' }}" + CLOSE + "{{ '\n</think>\n\n' }}",
        OPEN + CONTENT + CLOSE + "{{ '<|im_end|>\n' }}",
    ],
}
DISAGREEING = {
    "half of the answer": [HEADER, OPEN, "{{ m.content[:2] }}", CLOSE, "{{ m.content[2:] + '<|im_end|>\n' }}"],
    "the answer without its thought": [HEADER, THOUGHT, OPEN, CONTENT, CLOSE, "{{ '<|im_end|>\n' }}"],
    "the thought without its answer": [HEADER, OPEN, THOUGHT, CLOSE, CONTENT, "{{ '<|im_end|>\n' }}"],
}


def template_of(pieces: list[str]) -> str:
    return BEFORE + "".join(pieces) + AFTER


def without_tags(template: str) -> str:
    return template.replace(OPEN, "").replace(CLOSE, "")


@pytest.fixture(scope="module")
def chats(families: Any) -> list[Chat]:
    return [families.CHATS[name] for name in ("plain", "thoughts", "cut")]


@pytest.mark.parametrize("name", AGREEING)
def test_harmless_differences(families: Any, chats: list[Chat], name: str) -> None:
    """The samples are those of the same template without tags."""
    template = template_of(AGREEING[name])
    tagged, plain = (ChatRenderer(families.side_of("qwen3", text), {}) for text in (template, without_tags(template)))
    for chat in chats:
        rendered = tagged.render(chat)
        assert not rendered.left_out
        assert rendered == plain.render(chat)
        assert any(sum(sample.mask) for sample in rendered.samples)


@pytest.mark.parametrize("name", DISAGREEING)
def test_real_disagreement_leaves_the_turn_out(families: Any, name: str) -> None:
    template = template_of(DISAGREEING[name])
    chat = Chat(
        [families.said("user", "Odd?"), families.said("assistant", "Surely.", reasoning_content="Nine is odd.")], None
    )
    renderer = ChatRenderer(families.side_of("qwen3", template), {})
    with pytest.raises(LeftOut) as caught:
        renderer.render(chat)
    assert caught.value.reason == "generation marks disagree"
    assert ChatRenderer(families.side_of("qwen3", without_tags(template)), {}).render(chat).samples


def test_a_turn_that_the_tags_leave_out_is_left_out(families: Any) -> None:
    marked = HEADER + OPEN + CONTENT + CLOSE + END
    template = template_of(["{% if loop.last %}", marked, "{% else %}", HEADER + CONTENT + END, "{% endif %}"])
    only_long = template.replace("loop.last", "m.content | length > 3")
    messages = [families.said("user", "Hi?"), families.said("assistant", "Yo."), families.said("user", "And?")]
    chat = Chat([*messages, families.said("assistant", "Surely.")], None)
    rendered = ChatRenderer(families.side_of("qwen3", only_long), {}).render(chat)
    assert rendered.left_out == Counter({"not marked by the template": 1})
    assert [len(sample.ends) for sample in rendered.samples] == [1]


def test_a_tag_that_opens_before_the_turn(families: Any) -> None:
    """One tag around everything would have the user's words trained on."""
    template = OPEN + template_of([HEADER, CONTENT, END]) + CLOSE
    with pytest.raises(LeftOut) as caught:
        ChatRenderer(families.side_of("qwen3", template), {}).render(families.CHATS["plain"])
    assert caught.value.reason == "generation marks disagree"


def test_an_answer_that_says_its_words_twice(families: Any) -> None:
    """The marks are compared where the words stand, not where they were first found."""
    chat = Chat([families.said("user", "yes yes"), families.said("assistant", "yes", reasoning_content="yes")], None)
    both = template_of(AGREEING["with the thought"])
    assert ChatRenderer(families.side_of("qwen3", both), {}).render(chat).samples
    one = template_of(DISAGREEING["the answer without its thought"])
    with pytest.raises(LeftOut, match="generation marks disagree"):
        ChatRenderer(families.side_of("qwen3", one), {}).render(chat)
