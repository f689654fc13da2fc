"""Which message of a question its template leaves out of the prompt: the target would answer something else.

Templates skip roles that they do not know, or know at the start of a chat alone: `developer`, a second system message.
So every message but the assistant's, whose old thoughts templates drop on purpose, is rendered once more with words of
ours at both ends; where neither stands in the prompt, and the prompt is the same without them, the message has no
place in it. What a template cuts off a long content, a server cuts off as well. Knows text only.
"""

from collections.abc import Sequence
from itertools import count

from ..lines.inputs import LeftOut
from ..lines.json_text import short
from ..lines.shapes import Message
from .templates import Renders

DROPPED = "template drops a message"


def check_messages(renders: Renders, turns: Sequence[int]) -> dict[int, LeftOut]:
    """By turn, why its prompt is not the question that the chat asks; turns ascend and their prompts render.

    One rendering where the last of them holds every message, else one for each.
    """
    if not turns or dropped_message(renders, turns[-1]) is None:
        return {}
    found = {turn: dropped_message(renders, turn) for turn in turns}
    return {turn: fault for turn, fault in found.items() if fault is not None}


def dropped_message(renders: Renders, num_before: int) -> LeftOut | None:
    """The first message that the prompt after `num_before` messages does not hold, as a fault."""
    messages = renders.messages[:num_before]
    places = [place for place, message in enumerate(messages) if message["role"] != "assistant"]
    words = {place: f"{unused_word(messages)}{place}z" for place in places}
    try:
        seen = renders.text(with_words(messages, words), is_prompt=True)
    except LeftOut:  # a template that takes no other content, a JSON object say: then as it stands
        seen = renders.prompt(num_before)
        words = {place: messages[place]["content"].strip() for place in places}
        lost = [place for place in places if words[place] not in seen]
    else:
        lost = [place for place in places if words[place] not in seen]
        lost = [place for place in lost if is_same_without(renders, messages, {place: words[place]})]
    if not lost:
        return None
    message = messages[lost[0]]
    return LeftOut(DROPPED, f"message {lost[0] + 1} of role {message['role']!r}: {short(message['content'])}")


def is_same_without(renders: Renders, messages: list[Message], words: dict[int, str]) -> bool:
    """True where these words change nothing in the prompt."""
    return renders.text(with_words(messages, words), is_prompt=True) == renders.prompt(len(messages))


def with_words(messages: Sequence[Message], words: dict[int, str]) -> list[Message]:
    """The messages, those of the given places with their word at both ends of the content."""
    return [
        message | {"content": f"{words[place]} {message['content']} {words[place]}"} if place in words else message
        for place, message in enumerate(messages)
    ]


def unused_word(messages: Sequence[Message]) -> str:
    """A word that no content holds."""
    contents = [message["content"] for message in messages]
    words = (f"nuntioprobe{number}x" for number in count())
    return next(word for word in words if not any(word in content for content in contents))
