"""Settings that would do nothing: of sampling, of the target's template, a check that comes too late."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.regenerate.config import RegenerateConfig
from dflash_offline.extract.regenerate.run import regenerate
from dflash_offline.extract.targets.facts import read_text_side

Config = Callable[..., RegenerateConfig]
Questions = Callable[..., str]


@pytest.mark.parametrize("name", ["top_p", "top_k", "seed"])
def test_greedy_answers_read_no_setting_of_sampling(config: Config, name: str) -> None:
    value = {"top_p": 0.9, "top_k": 5, "seed": 3}[name]
    assert getattr(config(temperature=0.7, **{name: value}), name) == value
    with pytest.raises(UserError, match=f"{name} = {value}"):
        config(**{name: value})


def test_template_options_that_the_target_does_not_know_are_refused_before_anything_is_asked(
    config: Config, questions: Questions, server: Any, tmp_path: Path, case_target: Any, character_tokenizer: Any
) -> None:
    target = shutil.copytree(case_target(), tmp_path / "target")
    character_tokenizer("{{ thinking }}{{ messages }}").save_pretrained(target)
    with pytest.raises(UserError, match=r"template.thinkin = True is not read by the chat template of target"):
        regenerate(config(target=str(target), template={"thinkin": True}), [questions("a")])
    assert server.bodies == []
    assert not (tmp_path / "out" / "journal.log").exists()


def test_template_options_of_a_target_without_any_are_named(
    config: Config, questions: Questions, server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="counts 0 tokens in a prompt of 4"):  # the server here counts none
        regenerate(config(target="tiny", template={"thinking": True}), [questions("a")])
    assert "has no options: template.thinking changes nothing" in capsys.readouterr().err
    assert len(server.bodies) == 1


def test_a_target_that_comes_after_the_answers_is_refused(config: Config, questions: Questions, server: Any) -> None:
    chats = questions("a")
    regenerate(config(), [chats])
    with pytest.raises(UserError, match="no prompt of it was compared with a target: 'tiny' checks nothing"):
        regenerate(config(target="tiny"), [chats])
    assert not regenerate(config(), [chats]).is_new
    assert len(server.bodies) == 1


@pytest.fixture
def speaks_for_tiny(server: Any, replies: Any) -> None:
    """The server counts prompts as the packaged target's template makes them."""
    tokenizer = read_text_side("tiny").tokenizer

    def behave(body: dict[str, Any], tries: int) -> Any:
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        return replies.completion("fine", prompt_tokens=len(ids))

    server.behave = behave


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.usefixtures("speaks_for_tiny")
def test_another_target_for_a_folder_is_refused(
    config: Config, questions: Questions, tmp_path: Path, is_finished: bool
) -> None:
    chats = questions("a")
    regenerate(config(target="tiny"), [chats])
    whole = (tmp_path / "out" / "regenerate.json").read_bytes()
    if not is_finished:
        (tmp_path / "out" / "regenerate.json").unlink()
    with pytest.raises(UserError, match="was begun with target.name = 'tiny', this run has 'tiny-hybrid'"):
        regenerate(config(target="tiny-hybrid"), [chats])
    assert regenerate(config(), [chats]).is_new != is_finished, "no target given asks for none"
    assert (tmp_path / "out" / "regenerate.json").read_bytes() == whole, "the target of before stays on record"
    assert not regenerate(config(target="tiny"), [chats]).is_new


@pytest.mark.usefixtures("speaks_for_tiny")
def test_a_folder_that_was_begun_without_a_target_takes_none(
    config: Config, questions: Questions, tmp_path: Path
) -> None:
    chats = questions("a")
    regenerate(config(), [chats])
    (tmp_path / "out" / "regenerate.json").unlink()
    with pytest.raises(UserError, match="was begun with target = None, this run has"):
        regenerate(config(target="tiny"), [chats])


def test_a_target_that_was_refused_before_any_answer_binds_nothing(config: Config, questions: Questions) -> None:
    chats = questions("a")
    with pytest.raises(UserError, match="in a prompt of"):
        regenerate(config(target="tiny"), [chats])
    assert regenerate(config(temperature=0.7), [chats]).is_new
