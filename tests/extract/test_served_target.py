"""How a target and a line's chat are given to a serving engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.served_target import chat_request, served_path

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


def test_an_engine_gets_the_folder_with_the_weights() -> None:
    folder = Path(served_path("tiny"))
    assert folder.is_absolute()
    assert (folder / "model.safetensors").is_file()


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"is the GGUF file model\.gguf"):
        served_path(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "line, messages",
    [
        ({"messages": [USER, ANSWER]}, [USER]),
        ({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER]),
        ({"prompt": "hello"}, [USER]),
        ({"messages": [USER, ANSWER], "answer": "x", "id": 3}, [USER]),
    ],
)
def test_the_chat_ends_with_what_is_asked(line: dict[str, Any], messages: list[Any]) -> None:
    assert chat_request(line, {}) == {"messages": messages}


def test_tools_and_options_go_along_and_those_of_the_line_win() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    line = {"messages": [USER], "tools": [tool], "chat_template_kwargs": {"enable_thinking": True}}
    request = chat_request(line, {"enable_thinking": False, "other": 1})
    assert request["tools"] == [tool]
    assert request["chat_template_kwargs"] == {"enable_thinking": True, "other": 1}
    json.dumps(request)


def test_a_line_that_is_no_chat_is_an_error() -> None:
    with pytest.raises(ValueError):
        chat_request({"text": "plain"}, {})
