"""The question of one input line as token ids: read and rendered as `prepare` does for a target that is to answer.

`evaluate` is handed this for its prompts, so that a line means the same to both commands. Knows lines and chats;
knows no answer.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .chats.chat import ChatRenderer
from .lines.inputs import opened_sources
from .lines.inputs import read_lines as lines_of
from .lines.json_lines import InputLine, LeftOut, as_input_line
from .lines.shapes import Chat, line_meant
from .targets.facts import read_text_side


def read_lines(given: str) -> Iterator[InputLine]:
    """Every line of the files that one argument of `prepare` names, of any format that is read there.

    Raises UserError for files that are not there or broken.
    """
    with opened_sources([given]) as sources:
        for source in sources:
            yield from lines_of(source)


def read_questions(target: str, template: Mapping[str, Any]) -> Callable[[Any], list[int]]:
    """The reader of lines (values of JSON) for one target, with these options of its chat template for all.

    A line's own `tools` and `chat_template_kwargs` are used; answers at the end of its chat are dropped. The reader
    raises ValueError, with the reason, for a line that asks nothing. Raises UserError for an unknown target, and for
    one without a chat template.
    """
    renderer = ChatRenderer(read_text_side(target), dict(template))

    def ids_of(value: Any) -> list[int]:
        try:
            chat = line_meant(as_input_line(Path(), 0, value)).content
            if not isinstance(chat, Chat):
                raise LeftOut(f"{type(chat).__name__.lower()}, no chat", "only chats are asked")
            return renderer.question(chat)
        except LeftOut as fault:
            raise ValueError(f"{fault.reason}: {fault.detail}") from fault

    return ids_of
