"""A prompt that lacks a message of its chat is no question: the template has skipped a role that it does not know."""

from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat

DROPPED = "template drops a message"
ROLES = "{%- for m in messages if m.role in ('user', 'assistant', 'tool') or (loop.first and m.role == 'system') -%}"
BODY = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
ENDING = "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
SKIPPING = ROLES.replace("for m in messages if", "for m in messages -%}{%- if") + BODY + "{%- endif -%}" + ENDING
"""As Qwen's: what is no known role, or no system message at the start, is not written."""


def said(role: str, content: str = "words of it", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def fault_of(renderer: ChatRenderer, messages: list[dict[str, Any]]) -> LeftOut | None:
    try:
        renderer.render(Chat(messages, None))
    except LeftOut as fault:
        return fault
    return None


@pytest.fixture
def skipping(text_side: Any) -> ChatRenderer:
    return ChatRenderer(text_side(SKIPPING), {})


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([said("developer"), said("user")], "message 1 of role 'developer'"),
        ([said("system"), said("system", "others"), said("user")], "message 2 of role 'system'"),
        ([said("user"), said("system")], "message 2 of role 'system'"),
    ],
)
def test_a_message_that_the_template_skips(
    skipping: ChatRenderer, text_side: Any, messages: list[dict[str, Any]], place: str
) -> None:
    """Though its words stand in the prompt, as another message's."""
    fault = fault_of(skipping, [*messages, said("assistant", "words of it")])
    assert fault is not None
    assert fault.reason == DROPPED
    assert place in fault.detail
    with pytest.raises(LeftOut, match=DROPPED):
        skipping.question(Chat(messages, None))
    plain = ChatRenderer(text_side("plain"), {})
    assert fault_of(plain, [*messages, said("assistant", "words of it")]) is None
    assert plain.question(Chat(messages, None))


def test_turns_before_the_skipped_message_are_used(skipping: ChatRenderer) -> None:
    messages = [said("user"), said("assistant", "first"), said("system"), said("user"), said("assistant", "second")]
    rendered = skipping.render(Chat(messages, None))
    assert rendered.left_out == Counter({DROPPED: 1})
    (sample,) = rendered.samples
    trained = [token for token, on in zip(sample.ids, sample.mask) if on]
    assert skipping.encoder.decode(trained) == "first<|im_end|>"


@pytest.mark.parametrize("turns", ["auto", "each", "last"])
def test_every_turn_after_the_skipped_message_is_left_out(text_side: Any, turns: str) -> None:
    renderer = ChatRenderer(text_side(SKIPPING), {}, turns)
    messages = [said("developer"), said("user"), said("assistant", "first"), said("user"), said("assistant", "second")]
    fault = fault_of(renderer, messages)
    assert fault is not None
    assert fault.reason == DROPPED


@pytest.mark.parametrize("role", ["function", "ipython"])
def test_old_names_of_a_result_are_those_that_the_template_reads(text_side: Any, role: str) -> None:
    """One that knows `tool` alone is given it; one that writes any role keeps the name."""
    messages = [said("user"), said("assistant", "look"), said(role, "42"), said("assistant", "It is 42.")]
    for template, shown in ((SKIPPING, "tool"), ("plain", role)):
        renderer = ChatRenderer(text_side(template), {})
        (sample,) = renderer.render(Chat(messages, None)).samples
        assert f"<|im_start|>{shown}\n42<|im_end|>" in renderer.encoder.decode(sample.ids)


def test_a_result_that_the_template_knows_under_no_name(text_side: Any) -> None:
    renderer = ChatRenderer(text_side(SKIPPING.replace(", 'tool'", "")), {})
    for role in ("tool", "function"):
        rendered = renderer.render(
            Chat([said("user"), said("assistant", "look"), said(role, "42"), said("assistant", "It is 42.")], None)
        )
        assert rendered.left_out == Counter({DROPPED: 1})


@pytest.mark.parametrize("written", ["m.content[:2]", "m.content | trim", "m.content | upper", "m.content | tojson"])
def test_contents_that_the_template_changes_are_no_dropped_messages(text_side: Any, written: str) -> None:
    """A server cuts and escapes them in the same way."""
    template = text_side("plain").tokenizer.chat_template
    changing = f"({written} if m.role != 'assistant' else m.content)"
    renderer = ChatRenderer(text_side(template.replace("(m['content'] or '')", changing)), {})
    messages = [said("system", "a\n"), said("user", ' "é" '), said("assistant", "yes")]
    assert fault_of(renderer, messages) is None


def test_a_template_that_takes_no_word_of_ours(text_side: Any) -> None:
    """Then a message must stand in the prompt as it is."""
    refuses = "{%- for m in messages if 'nuntio' in m.content -%}{{ raise_exception('no') }}{%- endfor -%}"
    assert fault_of(ChatRenderer(text_side(refuses + SKIPPING), {}), [said("user"), said("assistant", "a")]) is None
    fault = fault_of(
        ChatRenderer(text_side(refuses + SKIPPING), {}), [said("user"), said("system", "b"), said("assistant", "a")]
    )
    assert fault is not None
    assert fault.reason == DROPPED


class Clock(datetime):
    """A date that knows how often a template has printed it."""

    num_prints = 0

    def strftime(self, format: str) -> str:
        Clock.num_prints += 1
        return super().strftime(format)


def test_one_rendering_a_chat(text_side: Any, chat: Any) -> None:
    """However many turns: two for each of them, and one for all."""
    renderer = ChatRenderer(text_side("{{- strftime_now('%Y') -}}" + SKIPPING), {}, now=Clock(2026, 1, 2))
    renderer.render(Chat(chat("q", "a"), None))
    before = Clock.num_prints
    renderer.render(Chat(chat("q", "a", "r", "b", "s", "c"), None))
    assert Clock.num_prints - before == 2 * 3 + 1
