"""A finished folder that lost a file, or holds another one: written again from the journal, or refused by name."""

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
FILES = ("responses.jsonl", "left-out.jsonl", "regenerate.json")


@pytest.fixture
def chats(questions: Questions) -> str:
    return questions("a", "bad", {"odd": 1}, "c")


@pytest.fixture
def finished(config: Config, chats: str, server: Any, replies: types.SimpleNamespace, tmp_path: Path) -> Path:
    """The folder of a run with an answered, a failed and a skipped line; the server is gone then."""
    server.behave = lambda body, tries: (
        replies.error(400, "no")
        if body["messages"][0]["content"] == "bad"
        else replies.sensible(body, tries) | {"model": "alias"}
    )
    regenerate(config(), [chats])
    server.stop()
    return tmp_path / "out"


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


@pytest.mark.parametrize("gone", [["responses.jsonl"], ["left-out.jsonl"], ["responses.jsonl", "left-out.jsonl"]])
def test_what_is_gone_is_written_again(
    gone: list[str], finished: Path, config: Config, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    for name in gone:
        (finished / name).unlink()
    report = regenerate(config(), [chats])
    assert contents(finished) == before
    assert report.is_new
    assert "complete already" not in report.text()
    assert f"{', '.join(gone)} of the finished folder" in capsys.readouterr().err
    assert not regenerate(config(), [chats]).is_new


@pytest.mark.parametrize("journal", ["gone", "short", "damaged"])
def test_without_a_whole_journal_it_is_refused(journal: str, finished: Path, config: Config, chats: str) -> None:
    path = finished / "journal.log"
    data = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    if journal == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: ends[1]] if journal == "short" else data[: ends[1] + 20] + b"X" + data[ends[1] + 21 :])
    (finished / "responses.jsonl").unlink()
    with pytest.raises(
        UserError, match=r"responses.jsonl' of a finished folder is gone, and its journal holds"
    ) as error:
        regenerate(config(), [chats])
    assert len(str(error.value).splitlines()) == 3
    assert not (finished / "responses.jsonl").exists()
    assert (finished / "regenerate.json").exists()


@pytest.mark.parametrize("retry_failed", [True, False])
@pytest.mark.parametrize("name", ["responses.jsonl", "left-out.jsonl"])
@pytest.mark.parametrize("change", [lambda data: data[:-5], lambda data: data.replace(b"a", b"b", 1)])
def test_a_file_that_was_changed_is_neither_taken_nor_overwritten(
    name: str, change: Callable[[bytes], bytes], retry_failed: bool, finished: Path, config: Config, chats: str
) -> None:
    before = contents(finished)
    path = finished / name
    path.write_bytes(changed := change(path.read_bytes()))
    with pytest.raises(UserError, match=f"{name}' is not what the finished run wrote") as error:
        regenerate(config(retry_failed=retry_failed), [chats])
    assert len(str(error.value).splitlines()) == 3
    assert path.read_bytes() == changed
    path.rename(finished.parent / "mine")
    regenerate(config(), [chats])
    assert contents(finished) == before, "moved away, it is written again"


def test_a_journal_of_other_settings_is_not_used(finished: Path, config: Config, chats: str, tmp_path: Path) -> None:
    from dflash_offline.extract.regenerate.journal import Journal, read_facts

    facts = read_facts(finished / "journal.log")
    assert facts is not None
    (finished / "journal.log").unlink()
    Journal(finished / "journal.log", facts | {"model": "large"}, 1).close()
    (finished / "responses.jsonl").unlink()
    with pytest.raises(UserError, match="was begun with model = 'large', this run has 'small'"):
        regenerate(config(), [chats])
