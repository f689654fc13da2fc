"""Our direct rendering gives the bytes of transformers' `apply_chat_template`, its slow and obvious reference."""

from typing import Any

import pytest
from dflash_offline.extract.chats.templates import ChatTemplate, Renders, as_plain
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat

FAMILIES = ["deepseek_r1", "gemma3", "glm4_5", "gptoss", "llama3_1", "mistral_v3", "qwen3", "qwen3_5"]


def theirs(tokenizer: Any, messages: list[Any], tools: Any, options: dict[str, Any], is_prompt: bool) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=is_prompt, tokenize=False, **options
        )
    except Exception:  # whatever a template raises, ours must fail as well
        return None


def ours(renders: Renders, count: int, is_prompt: bool) -> str | None:
    try:
        return renders.text(renders.messages[:count], is_prompt=is_prompt)
    except LeftOut:
        return None


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"bos_token": "<other>"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_beginning_of_every_chat(families: Any, family: str, options: dict[str, Any]) -> None:
    side = families.side_of(family, families.our_template(family).replace("strftime_now('%Y-%m-%d')", "'today'"))
    num_compared = 0
    for chat in families.CHATS.values():
        renders = Renders(ChatTemplate(side.tokenizer), chat, options)
        for count in range(1, len(chat.messages) + 1):
            for is_prompt in (True, False):
                expected = theirs(side.tokenizer, chat.messages[:count], chat.tools, options, is_prompt)
                if expected is None and family == "deepseek_r1":
                    continue  # arguments as objects: ours are spelled out, the next test
                assert ours(renders, count, is_prompt) == expected
                num_compared += expected is not None
    assert num_compared > 20


def test_arguments_are_spelled_out_where_the_template_joins_text(families: Any) -> None:
    tokenizer = families.side_of("deepseek_r1", families.our_template("deepseek_r1")).tokenizer
    chat = families.CHATS["tools"]
    as_text = [dict(message) for message in chat.messages]
    call = families.CALL | {"function": families.CALL["function"] | {"arguments": '{"a": 1, "b": 2}'}}
    as_text[1]["tool_calls"] = [call]
    expected = theirs(tokenizer, as_text, chat.tools, {}, False)
    assert expected is not None
    assert ours(Renders(ChatTemplate(tokenizer), chat, {}), len(chat.messages), False) == expected


def test_other_type_errors_are_told_as_they_came(families: Any) -> None:
    """Text arguments that do not help are not kept, and the template's first words are told."""
    template = (
        "{%- for m in messages -%}{{ m.tool_calls[0].function.arguments.a + 'x' if m.tool_calls else m.content }}"
    )
    side = families.side_of("qwen3", template + "{%- endfor -%}")
    renders = Renders(ChatTemplate(side.tokenizer), families.CHATS["tools"], {})
    with pytest.raises(LeftOut, match="TypeError: unsupported operand") as caught:
        renders.prompt(2)
    assert caught.value.reason == "template error"
    assert not renders.spells_arguments


def test_spans_of_generation_tags_are_characters_of_the_same_text(families: Any) -> None:
    template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + ':' -}}"
        "{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}{% endgeneration %}"
        "{%- else -%}{{- m.content -}}{%- endif -%}{%- endfor -%}"
    )
    renders = Renders(ChatTemplate(families.side_of("qwen3", template).tokenizer), families.CHATS["plain"], {})
    whole, spans = renders.whole(4, renders.messages[4])
    assert whole == renders.text(renders.messages, is_prompt=False)
    assert [whole[a:b] for a, b in spans or []] == ["Yo.", "So."]


def test_a_thought_is_read_under_any_of_its_names(families: Any) -> None:
    template = "{%- for m in messages -%}{{- m.thinking + '|' + m.reasoning_content + '|' + m.content -}}{%- endfor -%}"
    tokenizer = families.side_of("qwen3", template).tokenizer
    for key in ("reasoning_content", "reasoning", "thinking"):
        chat = Chat([{"role": "assistant", "content": "c", key: "t"}], None)
        assert ours(Renders(ChatTemplate(tokenizer), chat, {}), 1, False) == "t|t|c"


def test_a_template_sees_json_and_names_of_other_types() -> None:
    value = {"a": (1, 2.5, None, True), "b": [b"raw", {"c": "s"}]}
    assert as_plain(value) == {"a": [1, 2.5, None, True], "b": ["<bytes>", {"c": "s"}]}
