"""Templates with habits of their own: what they drop, add or print is found out, and used or told by name."""

from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat


@pytest.fixture(scope="module")
def render(families: Any) -> Any:
    """render(renderer, messages): the text of each sample with [[ ]] around what is trained on."""

    def texts(renderer: ChatRenderer, messages: list[dict[str, Any]]) -> list[str]:
        return [families.shown(renderer, sample) for sample in renderer.render(Chat(messages, None)).samples]

    return texts


def test_a_template_that_drops_the_answer(text_side: Any, chat: Any) -> None:
    """As one that reads only lists of parts does with text: what is left is not what the target wrote."""
    template = text_side("plain").tokenizer.chat_template.replace("(m['content'] or '')", "(m['content'][:4])")
    rendered = ChatRenderer(text_side(template), {}).render(Chat(chat("q", "Yes, indeed.", "r", "No."), None))
    assert rendered.left_out == Counter({"template drops part of the answer": 1})
    assert sum(rendered.samples[0].mask) == len("No.") + 1


def test_a_thought_that_the_template_drops(text_side: Any, chat: Any, render: Any) -> None:
    """One that strips every thought from a prompt that opens none: the message's own words are taken."""
    stripping = text_side("plain").tokenizer.chat_template.replace(
        "(m['content'] or '')", "m['content'].split('</think>')[-1]"
    )
    renderer = ChatRenderer(text_side(stripping), {})
    (text,) = render(renderer, chat("9?", "<think>odd</think>Yes."))
    assert text.endswith("assistant\n[[<think>odd</think>Yes.<|im_end|>]]")
    with pytest.raises(LeftOut, match="template drops part of the answer"):
        render(renderer, chat("9?", "Well, <think>odd</think>Yes."))


def test_a_thought_beside_the_content_goes_where_the_template_reads_thoughts(
    text_side: Any, chat: Any, render: Any
) -> None:
    renderer = ChatRenderer(text_side("drops-old-thoughts"), {})
    messages = chat("9?", "Yes.", "8?", "No.")
    messages[1]["reasoning_content"] = "odd"
    first, second = render(renderer, messages)
    assert first.endswith("assistant\n[[<think>\nodd\n</think>\n\nYes.<|im_end|>]]")
    assert second == (
        "<|im_start|>user\n9?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\n8?<|im_end|>\n<|im_start|>assistant\n[[No.<|im_end|>]]"
    )


def test_closing_marks_after_the_end_mark_are_the_templates_own(text_side: Any, chat: Any, render: Any) -> None:
    """As Phi-3 closes the last turn with its end mark and one of the whole text."""
    template = text_side("plain").tokenizer.chat_template + "{%- if not add_generation_prompt -%}<|pad|>{%- endif -%}"
    (text,) = render(ChatRenderer(text_side(template), {}), chat("Hi?", "Yo.", "And?", "So."))
    assert text.count("[[") == 2
    assert text.endswith("[[So.<|im_end|>]]")


def test_an_empty_thought_that_the_message_holds_is_its_own(text_side: Any, chat: Any, render: Any) -> None:
    template = text_side("plain").tokenizer.chat_template.replace(
        "(m['content'] or '')",
        "('<think></think>' if m['role'] == 'assistant' and '</think>' not in m['content'] else '') + m['content']",
    )
    renderer = ChatRenderer(text_side(template), {})
    messages = chat("9?", "Yes.", "8?", "<think></think>No.", "7?", "<think>hm</think>Yes.")
    (text,) = render(renderer, messages)
    assert text.split("assistant\n")[1].startswith("<think></think>[[Yes.<|im_end|>]]")
    assert text.split("assistant\n")[2].startswith("[[<think></think>No.<|im_end|>]]")
    assert text.split("assistant\n")[3].startswith("[[<think>hm</think>Yes.<|im_end|>]]")


def test_a_header_that_the_prompt_does_not_hold(text_side: Any, chat: Any, render: Any) -> None:
    """As where a tool's result leaves the turn open for the prompt, and the rendered answer opens another."""
    template = (
        "{%- for m in messages -%}{{- m.content if m.role == 'tool' else '<|im_start|>' + m.role + ':' + m.content -}}"
        "{{- '<|im_end|>' if m.role != 'tool' -}}{%- endfor -%}"
        "{{- '<|im_start|>assistant:' if add_generation_prompt and messages[-1].role != 'tool' -}}"
    )
    messages = [*chat("Sum?", "I look."), {"role": "tool", "content": "[3]"}, {"role": "assistant", "content": "3."}]
    rendered = ChatRenderer(text_side(template), {}).render(Chat(messages, None))
    assert rendered.left_out == Counter({"not what the generation prompt asks for": 1})
    spelled = template.replace("<|im_start|>", "## ")
    typed = chat("Header?", "## assistant: is one.")
    assert render(ChatRenderer(text_side(spelled), {}), typed)[0].endswith("[[## assistant: is one.<|im_end|>]]")


def test_templates_that_print_the_date_are_given_one(text_side: Any, chat: Any, render: Any) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}" + text_side("plain").tokenizer.chat_template
    renderer = ChatRenderer(text_side(template), {}, now=datetime(2026, 1, 2))
    assert renderer.prints_date
    assert render(renderer, chat("Hi?", "Yo."))[0].startswith("2026-01-02<|im_start|>")
    assert not ChatRenderer(text_side("plain"), {}).prints_date


def test_a_cut_answer_loses_all_that_the_template_closes_it_with(text_side: Any, chat: Any, render: Any) -> None:
    """Also marks that do not stop the target, or stand before the one that does."""
    messages = chat("Count.", "1, 2,")
    messages[1]["finish_reason"] = "length"
    for closing in ("<|pad|><|im_end|>\\n", "<|pad|>", "</answer>\\n", "\\n\\n"):
        template = text_side("plain").tokenizer.chat_template.replace("<|im_end|>\\n", closing)
        (text,) = render(ChatRenderer(text_side(template), {}), messages)
        assert text.endswith("assistant\n[[1, 2,]]"), closing


@pytest.mark.parametrize(
    ("family", "mark"), [("glm4_5", "<|user|>"), ("glm4_5", "<|observation|>"), ("qwen3", "<|im_end|>")]
)
def test_an_end_mark_typed_at_the_end_of_an_answer(families: Any, chat: Any, family: str, mark: str) -> None:
    """GLM's turns are closed by nothing, so the mark would pass for the template's own, and stand there twice later."""
    renderer = ChatRenderer(families.side_of(family, families.our_template(family)), {})
    reason = "end mark inside the answer"
    for content in (f"a{mark}", f"a{mark}\n", f"a{mark}b"):
        with pytest.raises(LeftOut, match=reason):
            renderer.render(Chat(chat("q", content), None))
        assert renderer.render(Chat(chat("q", content, mark, "b"), None)).left_out == Counter({reason: 1})
