"""Answers come from one model, by the name that replies give it, which may be an alias of the one asked for."""

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.regenerate.config import RegenerateConfig
from dflash_offline.extract.regenerate.run import regenerate

Config = Callable[..., RegenerateConfig]
Questions = Callable[..., str]
Rows = Callable[..., list[dict[str, Any]]]
Replies = types.SimpleNamespace


def naming(server: Any, replies: Replies, names: Callable[[str], str | None]) -> None:
    """The server's replies to a chat name the model that `names` gives for the chat's last message."""

    def behave(body: dict[str, Any], tries: int) -> Any:
        return replies.sensible(body, tries) | {"model": names(body["messages"][-1]["content"])}

    server.behave = behave


def written(config: RegenerateConfig) -> dict[str, Any]:
    return json.loads((Path(config.out) / "regenerate.json").read_text())


@pytest.mark.parametrize("said", ["small", "small-2024", None])
def test_the_name_that_replies_give_is_written_down(
    said: str | None,
    config: Config,
    questions: Questions,
    server: Any,
    replies: Replies,
    rows: Rows,
    capsys: pytest.CaptureFixture[str],
) -> None:
    naming(server, replies, lambda _: said)
    report = regenerate(config(), [questions("a", "b")])
    kept = written(config())
    names = [said] if said else []
    assert kept["facts"]["answered_as"] == names
    assert kept["report"]["models"] == ({server.url: names} if said else {})
    assert (kept["facts"]["model"], server.bodies[0]["model"]) == ("small", "small")
    assert [row["response_model"] for row in rows()] == [said or "small"] * 2
    is_alias = said == "small-2024"
    assert ("answers as model 'small-2024' where 'small' is asked for" in capsys.readouterr().err) == is_alias
    assert (f"{server.url}: its replies name the model small-2024" in report.text()) == is_alias
    assert not regenerate(config(), [questions("a", "b")]).is_new


def test_an_endpoint_that_answers_with_another_model_later_ends_the_run(
    config: Config, questions: Questions, server: Any, replies: Replies, rows: Rows
) -> None:
    chats = questions("a", "b", "c")
    naming(server, replies, lambda said: "other" if said == "b" else None if said == "a" else "small")
    with pytest.raises(UserError, match="answers with another model: its reply names 'small', those before .* 'other'"):
        regenerate(config(concurrency=1), [chats])
    naming(server, replies, lambda _: "small")
    with pytest.raises(UserError, match="its reply names 'small', those before named 'other'") as error:
        regenerate(config(concurrency=1), [chats])
    assert len(str(error.value).splitlines()) == 3
    server.bodies.clear()
    naming(server, replies, lambda _: "other")
    assert regenerate(config(concurrency=1), [chats]).counts["answered"] == 3
    assert [body["messages"][0]["content"] for body in server.bodies] == ["c"], "what was answered is safe"
    assert [row["response_model"] for row in rows()] == ["small", "other", "other"]


def test_two_endpoints_with_different_models(
    config: Config, questions: Questions, server: Any, make_server: Any, replies: Replies
) -> None:
    other = make_server()
    naming(server, replies, lambda _: "small")
    naming(other, replies, lambda _: "small-v2")
    with pytest.raises(UserError, match="answers with another model"):
        regenerate(config(endpoint=(server.url, other.url), concurrency=1), [questions(*"abcdefgh")])
    assert not (Path(config().out) / "regenerate.json").exists()


def test_every_endpoint_is_written_down_without_its_password(
    config: Config, questions: Questions, server: Any, make_server: Any, replies: Replies
) -> None:
    other = make_server()
    for one in (server, other):
        naming(one, replies, lambda _: "small")
    with_password = server.url.replace("http://", "http://me:secret@")
    regenerate(config(endpoint=(with_password, other.url), concurrency=1), [questions(*map(str, range(30)))])
    assert written(config())["report"]["models"] == {url: ["small"] for url in sorted((server.url, other.url))}
    assert "secret" not in "".join(path.read_text() for path in Path(config().out).iterdir())


def test_a_name_that_changes_within_a_chat(config: Config, questions: Questions, server: Any, replies: Replies) -> None:
    naming(server, replies, lambda said: said)
    chat = [{"role": role, "content": text} for role, text in (("user", "m"), ("assistant", "x"), ("user", "n"))]
    with pytest.raises(UserError, match="its reply names 'n', those before named 'm'"):
        regenerate(config(), [questions(chat)])
    assert not (Path(config().out) / "journal.log").exists(), "what is refused before any answer binds no further try"
