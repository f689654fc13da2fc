"""The prompts that `evaluate` asks are those that `prepare --responses target` would ask of the same lines."""

import re
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.questions import read_questions
from dflash_offline.extract.targets.facts import read_text_side
from dflash_offline.store.samples import SampleTable

TEMPLATE = """\
{%- if tools -%}{{- '[' + (tools | tojson) + ']' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\n' + m['content'] -}}
{%- for call in m.get('tool_calls', []) -%}{{- call['function']['arguments'] | tojson -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}
{%- endif -%}{%- endif -%}
"""
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
LINES = [
    {"prompt": "plain"},
    {"prompt": "no thought", "chat_template_kwargs": {"enable_thinking": False}},
    {"prompt": "as text", "chat_template_kwargs": '{"enable_thinking": false}'},
    {"prompt": "a tool", "tools": [TOOL]},
    {"prompt": "the old name of tools", "functions": [TOOL]},
    {"prompt": "under a system", "system": "be short"},
    {
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "dropped"},
        ]
    },
]


@pytest.fixture
def target(tmp_path: Path, case_target: Any, character_tokenizer: Any) -> str:
    """The small target with a template that reads tools and an option."""
    folder = tmp_path / "target"
    folder.mkdir()
    for path in case_target().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    character_tokenizer(TEMPLATE).save_pretrained(folder)
    return str(folder)


def test_a_line_asks_what_prepare_asks(target: str, tmp_path: Path, write_lines: Any) -> None:
    config = PrepareConfig(
        target=target, responses="target", out=str(tmp_path / "data"), max_new_tokens=4, min_trained=1, device="cpu"
    )
    prepare(config, [write_lines(tmp_path / "in.jsonl", LINES)])
    samples = SampleTable(tmp_path / "data")
    asked = []
    for ids, mask in map(samples.tokens, range(len(samples))):
        asked.append(ids[: int(mask.argmax())].tolist())
    read = read_questions(target, {})
    assert [read(line) for line in LINES] == asked
    texts = [read_text_side(target).tokenizer.decode(ids) for ids in asked]
    assert [text.endswith("<think></think>") for text in texts] == [False, True, True, False, False, False, False]
    assert ['"name": "add"' in text for text in texts] == [False, False, False, True, True, False, False]
    assert '{"a": 1}' in texts[-1]
    assert "dropped" not in texts[-1]


def test_options_of_the_run_hold_for_every_line(target: str) -> None:
    read, plain = read_questions(target, {"enable_thinking": False}), read_questions(target, {})
    assert read({"prompt": "q"}) == plain({"prompt": "q", "chat_template_kwargs": {"enable_thinking": False}})
    assert read({"prompt": "q"}) != plain({"prompt": "q"})


@pytest.mark.parametrize(
    "line, reason",
    [
        ([1], "not an object"),
        ({"text": "plain"}, "text, no chat"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "tokens, no chat"),
        ({"answer": "4"}, "unknown shape"),
        ({"messages": [{"role": "system", "content": "only rules"}]}, "no question"),
        ({"prompt": "q", "tools": "[{"}, "broken tools"),
        ({"prompt": "q", "chat_template_kwargs": [1]}, "broken template options"),
        ({"prompt": "q", "chat_template_kwargs": {"add_generation_prompt": False}}, "reserved template option"),
        ({"prompt": "q", "chat_template_kwargs": {"enable_thinking": True}}, "template options disagree"),
        ({"messages": [{"role": "user"}]}, "no content"),
    ],
)
def test_a_line_that_asks_nothing_says_why(target: str, line: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        read_questions(target, {"enable_thinking": False})(line)


def test_what_a_template_raises_is_the_lines_fault(target: str, character_tokenizer: Any) -> None:
    (Path(target) / "chat_template.jinja").unlink()
    character_tokenizer("{{ messages[1]['content'] ~ messages[2].content.x.y }}").save_pretrained(target)
    with pytest.raises(ValueError, match="template error"):
        read_questions(target, {})({"prompt": "q"})


def test_a_target_without_a_template_is_refused(target: str, character_tokenizer: Any) -> None:
    (Path(target) / "chat_template.jinja").unlink()
    character_tokenizer(None).save_pretrained(target)
    with pytest.raises(UserError, match="has no chat template"):
        read_questions(target, {})
