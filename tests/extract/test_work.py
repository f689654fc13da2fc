"""On which side of the split a line is: by what it asks, or by all it says where it asks nothing."""

from pathlib import Path
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import Sample
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.lines.inputs import InputLine
from dflash_offline.extract.work import Maker, new_outcome
from tokenizers import processors

NUM_LINES = 400
BOS, SOP = 1, 0
"""Two special tokens of the tokenizer."""


@pytest.fixture
def maker(text_side: Any) -> Any:
    """maker(["<|im_start|>"], split=0.5): with a tokenizer that opens every text so."""

    def make(opening: list[str] | None = None, **settings: Any) -> Maker:
        side, names = text_side("plain"), opening or []
        side.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join([*names, "$A"]),
            special_tokens=[(name, side.tokenizer.convert_tokens_to_ids(name)) for name in names],
        )
        return Maker(PrepareConfig(**{"target": "t", "out": "o", "min_trained": 2, "split": 0.5} | settings), side, 512)

    return make


def split_of(maker: Maker, value: dict[str, Any], written: Sample | None = None) -> str:
    """The split of a line that holds its answer, or of one to which the target has written one."""
    line = InputLine(Path("in.jsonl"), 1, value)
    if written is None:
        found = maker.outcome(line)
    else:
        found = new_outcome(line)
        maker.finish(found, maker.understood(line), [written])
    assert found.fault is None
    return found.split


def assert_spread(maker: Maker, lines: list[dict[str, Any]]) -> None:
    """About half of the lines is held out: within 4 standard deviations."""
    share = sum(split_of(maker, line) == "heldout" for line in lines) / len(lines)
    assert abs(share - 0.5) < 4 * (0.25 / len(lines)) ** 0.5


@pytest.mark.parametrize("opening", [[], ["<|im_start|>"], ["<|im_start|>", "<|pad|>"]])
def test_texts_are_spread_by_all_they_say(maker: Any, opening: list[str]) -> None:
    """Though all begin with the same token, the tokenizer's own or that of their first word."""
    assert_spread(maker(opening), [{"text": f"The text number {i}"} for i in range(NUM_LINES)])


@pytest.mark.parametrize("before", [[], [BOS], [70], [BOS, SOP], [BOS, SOP, BOS]], ids=str)
def test_ids_without_a_prompt_are_spread_by_all_they_say(maker: Any, before: list[int]) -> None:
    """One token, or special tokens alone, ask nothing."""
    mask = [0] * len(before) + [1] * 4
    lines = [{"input_ids": [*before, 9, 10 + i // 200, 10 + i % 200, 9], "loss_mask": mask} for i in range(NUM_LINES)]
    assert_spread(maker(), lines)


@pytest.mark.parametrize("before", [[70, 71], [BOS, 70], [70, BOS]], ids=str)
def test_ids_that_ask_the_same_are_on_one_side(maker: Any, before: list[int]) -> None:
    lines = [{"input_ids": [*before, 9, 10 + i, 9], "loss_mask": [0, 0, 1, 1, 1]} for i in range(60)]
    assert len({split_of(maker(), line) for line in lines}) == 1


def test_chats_that_ask_the_same_are_on_one_side(maker: Any, chat: Any) -> None:
    made = maker()
    assert len({split_of(made, {"messages": chat("q", f"answer {i}")}) for i in range(60)}) == 1
    assert len({split_of(made, {"messages": chat(f"q{i}", "answer")}) for i in range(60)}) == 2


def test_a_text_that_the_target_answers_is_a_prompt(maker: Any) -> None:
    made = maker(responses="target")
    asked = {"text": "The same question"}
    prompt = made.question_of(made.understood(InputLine(Path("in.jsonl"), 1, asked)))
    written = [Sample([*prompt, 70, 71 + i], [False] * len(prompt) + [True] * 2) for i in range(60)]
    assert len({split_of(made, asked, sample) for sample in written}) == 1


@pytest.mark.parametrize("turns", ["auto", "each", "last"])
def test_the_first_question_decides_whatever_is_trained_on(maker: Any, chat: Any, turns: str) -> None:
    """Not weights, later turns, blanks, tools or how the template writes them."""
    made = maker(turns=turns)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for i in range(20):
        asked = [{"role": "system", "content": "s"}, *chat(f"question {i}", "first answer")]
        more = [*asked, *chat("and more?", "second answer")]
        unweighted = [*asked[:-1], asked[-1] | {"weight": 0}, *chat("and more?", "another answer")]
        spaced = [asked[0] | {"content": "s\n"}, asked[1] | {"content": f" question {i}\n"}, *more[2:]]
        greeted = [asked[0], *chat(f"question {i}")]
        lines = [{"messages": messages} for messages in (asked, more, unweighted, spaced)]
        lines += [{"messages": more, "tools": [tool]}, {"prompt": greeted, "completion": "another one"}]
        assert len({split_of(made, line) for line in lines}) == 1, i


def test_chats_that_begin_with_a_greeting_are_spread_by_what_is_asked_after_it(maker: Any, chat: Any) -> None:
    greeting = {"role": "assistant", "content": "How can I help?"}
    assert_spread(maker(), [{"messages": [greeting, *chat(f"question {i}", "an answer")]} for i in range(NUM_LINES)])


def test_blanks_around_a_text_do_not_count(maker: Any) -> None:
    made = maker()
    for i in range(20):
        assert len({split_of(made, {"text": text}) for text in (f"text {i}", f" text {i}\n")}) == 1


def test_a_question_is_on_one_side_whoever_answers_it(maker: Any, chat: Any) -> None:
    given, asking = maker(), maker(responses="target")
    for i in range(20):
        line = {"messages": chat(f"question {i}", "an answer")}
        prompt = asking.question_of(asking.understood(InputLine(Path("in.jsonl"), 1, line)))
        written = Sample([*prompt, 70, 71], [False] * len(prompt) + [True] * 2)
        assert split_of(asking, line, written) == split_of(given, line)


def test_tools_that_the_template_does_not_read_are_noted(text_side: Any, chat: Any) -> None:
    config = PrepareConfig(target="t", out="o", min_trained=2)
    line = {"messages": chat("q", "an answer"), "tools": [{"type": "function", "function": {"name": "add"}}]}
    for template, number in (("plain", 1), ("tools", 0)):
        found = Maker(config, text_side(template), 512).outcome(InputLine(Path("in.jsonl"), 1, line))
        assert found.fault is None
        assert found.noted["tools_unread"] == number
