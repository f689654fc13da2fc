"""Settings that would do nothing are refused; template options of the lines that do nothing are counted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.chats.templates import ChatTemplate
from dflash_offline.extract.config import READ_WITH, PrepareConfig
from dflash_offline.extract.counts import PrepareReport
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import REJECTED_NAME
from dflash_offline.store.samples import SampleTable

Run = Callable[..., PrepareReport]
OTHER_VALUES = {
    "turns": "each",
    "long": "drop",
    "origin": "target greedy",
    "max_new_tokens": 512,
    "device": "cpu",
    "dtype": "float32",
    "token_budget": 100,
}
READS_OPTIONS = """\
{%- macro said(m) -%}{{ m['content'] ~ tone|default('') }}<|im_end|>{%- endmacro -%}
{%- if not enable_thinking is defined -%}{%- set enable_thinking = false -%}{%- endif -%}
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- raise_exception('no tools') -}}{%- endif -%}
{%- set number = loop.index -%}{{- said(m) -}}
{%- endfor -%}
{%- if add_generation_prompt and enable_thinking -%}{{- '<think>' -}}{%- endif -%}
"""


@pytest.fixture
def target(tmp_path: Path, case_target: Any, character_tokenizer: Any) -> str:
    """A target (no weights) whose template reads the options `enable_thinking` and `tone`, and no date."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_bytes((case_target() / "config.json").read_bytes())
    tokenizer = character_tokenizer(READS_OPTIONS)
    tokenizer.bos_token = "<|pad|>"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(tmp_path: Path, target: str, write_lines: Any) -> Run:
    """run(lines, **settings): prepare them, or the lines of before, into tmp_path/data."""

    def go(lines: list[Any] | None, *, out: str = "data", **settings: Any) -> PrepareReport:
        if lines is not None:
            write_lines(tmp_path / "in.jsonl", lines)
        settings = {"target": target, "max_length": 512, "min_trained": 2} | settings
        return prepare(PrepareConfig(out=str(tmp_path / out), **settings), [str(tmp_path / "in.jsonl")])

    return go


@pytest.mark.parametrize("name", [name for names in READ_WITH.values() for name in names])
def test_a_setting_of_the_other_responses_is_refused(name: str) -> None:
    right, wrong = ("given", "target") if name in READ_WITH["given"] else ("target", "given")
    value = OTHER_VALUES[name]
    assert getattr(PrepareConfig(responses=right, **{name: value}), name) == value
    with pytest.raises(UserError, match=f"{name} = {value!r} does nothing with --responses {wrong}") as caught:
        PrepareConfig(responses=wrong, **{name: value})
    assert f"give --responses {right}" in caught.value.advice


def test_the_target_answers_the_same_with_every_setting_that_is_refused_there(tmp_path: Path) -> None:
    """What `READ_WITH` says of given answers, held against a run whose config is not checked."""
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": f"List lamp {n} times.", "response_origin": "elsewhere"}) + "\n" for n in (2, 40))
    )
    prints = []
    for number, changes in enumerate([{}, {name: OTHER_VALUES[name] for name in READ_WITH["given"]}]):
        out = str(tmp_path / str(number))
        config = PrepareConfig(
            responses="target", device="cpu", out=out, max_new_tokens=30, max_length=60, min_trained=2
        )
        for name, value in changes.items():
            object.__setattr__(config, name, value)
        report = prepare(config, [str(tmp_path / "in.jsonl")])
        prints.append((SampleTable(Path(out)).fingerprint(), report.counts))
    assert prints[0] == prints[1]
    assert prints[0][1]["samples"] == 2


def test_answers_are_limited_to_512_tokens_unless_said() -> None:
    assert PrepareConfig(responses="target").answer_tokens == 512
    assert PrepareConfig(responses="target", max_new_tokens=7).answer_tokens == 7


def test_a_template_option_that_is_not_read_is_refused_with_those_that_are(run: Run, chat: Any, tmp_path: Path) -> None:
    lines = [{"messages": chat("q", "an answer")}]
    with pytest.raises(UserError, match=r"template.enable_thinkin = True is not read by the chat template") as caught:
        run(lines, template={"tone": "", "enable_thinkin": True})
    assert caught.value.expected == "one of its options: enable_thinking, tone"
    with pytest.raises(UserError, match=r"template.number = 1 is not read"):
        run(None, template={"number": 1})
    assert not (tmp_path / "data").exists()
    assert run(None, template={"tone": "!", "enable_thinking": False}).is_new


def test_a_template_without_options_and_a_missing_one_say_so(
    run: Run, case_target: Any, character_tokenizer: Any, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = [{"input_ids": list(range(6, 18)), "loss_mask": [0] * 6 + [1] * 6}]
    run(ready, target=str(case_target()), template={"x": 1, "y": 2})
    assert "has no options: template.x, template.y changes nothing" in capsys.readouterr().err
    (Path(target) / "chat_template.jinja").unlink()
    character_tokenizer(None).save_pretrained(target)
    run(ready, template={"tone": "x"}, out="other")
    assert "has no options: template.tone changes nothing" in capsys.readouterr().err


def test_an_option_of_the_template_for_tools_alone_is_read(character_tokenizer: Any) -> None:
    tokenizer = character_tokenizer("{{ messages }}{{ mood }}")
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}{{ parallel }}"}
    template = ChatTemplate(tokenizer)
    assert template.idle_options({"mood": 1, "parallel": True}, "t") is None
    with pytest.raises(UserError, match="template.tone") as caught:
        template.idle_options({"mood": 1, "tone": 1}, "t")
    assert caught.value.expected == "one of its options: mood, parallel"
    assert template.unread({"mood": 1, "parallel": 1}, None) == ["parallel"]
    assert template.unread({"mood": 1, "parallel": 1}, [{}]) == ["mood"]


@pytest.mark.parametrize("processes", [1, 2])
def test_options_of_lines_that_the_template_does_not_read_are_counted(run: Run, chat: Any, processes: int) -> None:
    options = [{"tone": "!"}, {"tone": "?", "mood": "glad"}, {"thinking": True}, {}, None]
    lines = [{"messages": chat(f"q{i}", "an answer"), "chat_template_kwargs": own} for i, own in enumerate(options)]
    report = run([*lines, {"messages": chat("no answer"), "chat_template_kwargs": {"x": 1}}], processes=processes)
    assert (report.counts["lines_used"], report.counts["options_unread"]) == (5, 2)
    assert "  2 lines with template options that the template does not read" in report.text().splitlines()


def test_options_of_lines_that_the_target_answers_are_counted(tmp_path: Path, write_lines: Any) -> None:
    lines = [{"prompt": "List lamp 3 times.", "chat_template_kwargs": {"enable_thinking": True}}]
    config = PrepareConfig(responses="target", out=str(tmp_path / "data"), max_new_tokens=20, min_trained=2)
    report = prepare(config, [write_lines(tmp_path / "in.jsonl", lines)])
    assert report.counts["options_unread"] == 1


def test_a_date_for_a_template_that_prints_none_is_refused(run: Run, chat: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="date = '2026-01-31', but the chat template of target .* prints no date"):
        run([{"messages": chat("q", "an answer")}], date="2026-01-31")
    assert not (tmp_path / "data").exists()


def test_strict_says_of_a_folder_that_is_there_what_it_says_of_a_new_one(run: Run, chat: Any, tmp_path: Path) -> None:
    good = {"messages": chat("q", "an answer")}
    lines = [good, good, {"messages": chat("only a question")}, ["no object"]]
    with pytest.raises(UserError) as new:
        run(lines, strict=True)
    assert run(None).is_new
    before = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    with pytest.raises(UserError) as there:
        run(None, strict=True)
    assert str(there.value) == str(new.value)
    assert "line 3 of in.jsonl cannot be used: no answer" in str(new.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == before


def test_strict_finds_a_folder_of_duplicates_as_it_was(run: Run, chat: Any) -> None:
    good = {"messages": chat("q", "an answer")}
    assert run([good, good]).counts["left_out"] == {"duplicate": 1}
    assert not run(None, strict=True).is_new


@pytest.mark.parametrize("fault", ["gone", "broken"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_folder_without_its_list_is_not_complete(
    run: Run, chat: Any, tmp_path: Path, fault: str, strict: bool
) -> None:
    run([{"messages": chat("q", "an answer")}, ["no object"]])
    listed = tmp_path / "data" / REJECTED_NAME
    listed.unlink() if fault == "gone" else listed.write_bytes(b"no table")
    with pytest.raises(UserError, match="is complete no more: rejected.parquet cannot be read") as caught:
        run(None, strict=strict)
    assert len(str(caught.value).splitlines()) == 3
