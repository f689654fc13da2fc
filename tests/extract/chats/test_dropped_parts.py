"""A part of a message that the template drops is found, though the same words stand elsewhere in the answer."""

from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.chats.dropped_parts import missing_part
from dflash_offline.extract.chats.template_habits import Habits
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat

CALLS = "{%- for call in m.get('tool_calls', []) -%}"
ARGUMENTS = "(call['function']['arguments'] | tojson)"
DROPS_CALLS = ("template drops tool calls", "call 1 of 1, 'add'")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def answered(content: str, *calls: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more},
    ]


def fault_of(renderer: ChatRenderer, messages: list[dict[str, Any]]) -> tuple[str, str] | None:
    try:
        renderer.render(Chat(messages, None))
    except LeftOut as fault:
        return fault.reason, fault.detail
    return None


@pytest.fixture
def tools(text_side: Any) -> Any:
    """tools(old, new): a renderer whose template writes calls, changed at one place."""

    def make(old: str = "", new: str = "") -> ChatRenderer:
        template = text_side("tools").tokenizer.chat_template
        assert old in template
        return ChatRenderer(text_side(template.replace(old, new, 1) if old else template), {})

    return make


def test_a_dropped_call_whose_name_the_content_holds(text_side: Any, tools: Any) -> None:
    messages = answered("I add a: 1 and b: 2.", call("add", a=1))
    assert fault_of(ChatRenderer(text_side("plain"), {}), messages) == DROPS_CALLS
    assert fault_of(tools(), messages) is None


@pytest.mark.parametrize("second", [call("mul", a=3), call("add", a=1), call("add")])
def test_one_of_several_calls_is_dropped(tools: Any, second: dict[str, Any]) -> None:
    """Even one that says the same as the first, or whose name is in the content."""
    messages = answered("Now mul.", call("add", a=1), second)
    only_first = tools(CALLS, CALLS.replace("m.get('tool_calls', [])", "m.get('tool_calls', [])[:1]"))
    name = second["function"]["name"]
    assert fault_of(only_first, messages) == ("template drops tool calls", f"call 2 of 2, {name!r}")
    assert fault_of(tools(), messages) is None


def test_dropped_arguments(tools: Any) -> None:
    assert fault_of(tools(ARGUMENTS, "'{}'"), answered("a is 1", call("add", a=1))) == DROPS_CALLS


def test_a_content_dropped_beside_a_call_that_holds_its_words(tools: Any) -> None:
    dropping = tools("m['content'] -", "('' if m.get('tool_calls') else m['content']) -")
    messages = answered("add", call("add", a=1))
    assert fault_of(dropping, messages) == ("template drops part of the answer", "'add' beside a call")
    assert fault_of(dropping, answered("", call("add", a=1))) is None
    assert fault_of(tools(), messages) is None


def test_a_thought_dropped_beside_a_call_that_holds_its_words(tools: Any) -> None:
    reads = "'<think>' + m.get('reasoning_content', '') + '</think>' + m['content'] -"
    messages = answered("", call("add", a=1), reasoning_content="add")
    assert fault_of(tools("m['content'] -", reads), messages) is None
    dropping = tools("m['content'] -", f"m['content'] if m.get('tool_calls') else {reads}")
    assert fault_of(dropping, messages) == ("template drops part of the answer", "'add' beside a call")


def test_a_thought_that_the_content_repeats(text_side: Any) -> None:
    plain = text_side("plain").tokenizer.chat_template
    thought = "m.get('reasoning_content', '')"
    reads = f"({thought} + '</think>' + m['content'])"
    messages = answered("9 is odd.", reasoning_content="9")
    assert fault_of(ChatRenderer(text_side(plain.replace("(m['content'] or '')", reads)), {}), messages) is None
    dropping = reads.replace(thought, f"('' if 'odd' in m['content'] else {thought})")
    found = fault_of(ChatRenderer(text_side(plain.replace("(m['content'] or '')", dropping)), {}), messages)
    assert found == ("template drops part of the answer", "'9' is not in what it makes of the turn")


@pytest.mark.parametrize(
    ("thought", "content", "text", "missing"),
    [
        ("9", "9 is odd", "<think>9</think>9 is odd", None),
        ("9 is odd", "9", "<think>9 is odd</think>9", None),
        ("9", "9", "<think>9</think>9", None),
        ("9", "9", "<think></think>9", "9"),
        ("9", "9 is odd", "<think></think>9 is odd", "9"),
        ("9 is odd", "9", "<think>9 is odd</think>", "9"),
        ("a", "<think>a</think>b", "<think>a</think>b", None),
        ("", "<think>b</think>b", "<think></think>b", "b"),
    ],
)
def test_parts_stand_in_places_of_their_own(thought: str, content: str, text: str, missing: str | None) -> None:
    habits = Habits("", "", "", "", is_thinking=True, takes_thoughts_in_content=False, after_answer="", after_call="")
    message = {"role": "assistant", "content": content, "reasoning_content": thought}
    assert missing_part(message, text, habits) == missing
