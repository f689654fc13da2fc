"""One chat has one prompt: in `prepare --responses target`, in what `regenerate` sends, and in its --target check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.regenerate.config import RegenerateConfig
from dflash_offline.extract.regenerate.run import regenerate
from dflash_offline.extract.regenerate.target_check import TargetCheck
from dflash_offline.extract.rejected import read_rejected
from dflash_offline.extract.targets.facts import read_text_side
from dflash_offline.store.samples import SampleTable

Message = dict[str, Any]
USER, SYSTEM = {"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}
DEVELOPER, GREETING = {"role": "developer", "content": "rules"}, {"role": "assistant", "content": "I am a bot"}
SAID = {"role": "assistant", "content": "as the model says"}
CHATS: list[list[Message]] = [
    [USER],
    [USER, SAID],
    [USER, SYSTEM],
    [USER, DEVELOPER, SAID],
    [GREETING, USER],
    [SYSTEM, GREETING, USER, SAID],
    [GREETING, SYSTEM, USER],
    [USER, SAID, SYSTEM],
    [USER, SAID, SYSTEM, SAID],
    [SYSTEM, GREETING, USER, SAID, DEVELOPER, USER, SYSTEM],
    [USER, SAID, USER, SAID],
]
ASK_NOTHING: list[list[Message]] = [[SYSTEM], [GREETING], [SYSTEM, GREETING], [GREETING, SYSTEM], [DEVELOPER, SYSTEM]]


@pytest.fixture
def chats(questions: Callable[..., str]) -> str:
    return questions(*CHATS, *ASK_NOTHING)


@pytest.fixture
def prompts_of_prepare(case_target: Any, chats: str, tmp_path: Path) -> list[list[int]]:
    """The prompt of each of CHATS as token ids."""
    data = str(tmp_path / "data")
    settings = {"min_trained": 1, "duplicates": "keep", "device": "cpu", "max_new_tokens": 4, "max_length": 512}
    prepare(PrepareConfig(target=str(case_target()), responses="target", out=data, **settings), [chats])
    table = SampleTable(tmp_path / "data")
    assert table.column("source_line").tolist() == list(range(1, len(CHATS) + 1))
    left_out = [(row["line"], row["reason"]) for row in read_rejected(tmp_path / "data", "line")]
    assert left_out == [(len(CHATS) + 1 + place, "no question") for place in range(len(ASK_NOTHING))]
    return [ids[: int(mask.argmax())].tolist() for ids, mask in map(table.tokens, range(len(table)))]


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_chat_has_one_prompt(
    prompts_of_prepare: list[list[int]],
    is_checked: bool,
    case_target: Any,
    chats: str,
    config: Callable[..., RegenerateConfig],
    rows: Callable[..., list[dict[str, Any]]],
    server: Any,
    replies: Any,
) -> None:
    """The model says what the input's assistant said, so that the history of later questions is the input's too."""
    target = str(case_target())
    tokenizer = read_text_side(target).tokenizer
    sent: list[list[int]] = []

    def behave(body: dict[str, Any], tries: int) -> Any:
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        sent.append(ids)
        return replies.completion(SAID["content"], prompt_tokens=len(ids))

    server.behave = behave
    report = regenerate(config(target=target if is_checked else None, concurrency=1), [chats])
    assert report.counts["answered"] == len(CHATS)
    assert report.counts["checked"] == (len(sent) if is_checked else 0)
    assert [row["reason"] for row in rows("left-out.jsonl")] == ["no question"] * len(ASK_NOTHING)
    assert all(prompt in sent for prompt in prompts_of_prepare)
    check = TargetCheck(target)
    for row, prompt in zip(rows(), prompts_of_prepare, strict=True):
        ids = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        seen = check.prompt(row["messages"][:-1], None, {})
        assert ids == prompt
        assert (seen.num_tokens, seen.end) == (len(prompt), tokenizer.decode(prompt[-24:]))


def test_what_prepare_reads_of_the_answers_has_the_prompt_that_was_sent(
    case_target: Any,
    chats: str,
    config: Callable[..., RegenerateConfig],
    prompts_of_prepare: list[list[int]],
    server: Any,
    replies: Any,
    tmp_path: Path,
) -> None:
    server.behave = lambda body, tries: replies.completion(SAID["content"])
    regenerate(config(), [chats])
    again = PrepareConfig(
        target=str(case_target()), out=str(tmp_path / "again"), min_trained=1, duplicates="keep", turns="last"
    )
    prepare(again, [str(tmp_path / "out" / "responses.jsonl")])
    table = SampleTable(tmp_path / "again")
    found = [ids[: int(mask.argmax())].tolist() for ids, mask in map(table.tokens, range(len(table)))]
    assert found == prompts_of_prepare
