"""The answer of one assistant turn: the text that the target would have written after the prompt of that turn.

Usually the chat up to the turn's end, rendered, begins with the prompt, and what it adds is the answer. Two kinds
of templates render otherwise, because a server never renders the answer it is about to write:

- gpt-oss drops the thought of a tool call once a final answer stands in the chat. The prompt, which holds that
  thought, is what a server sends; the answer is taken from the end of the rendering.
- DeepSeek-R1 opens the thought in the prompt and drops it from every rendered answer. A message that holds its
  thought (`<think>...</think>` in the content) is then taken word for word, and closed as the template closes.

Nothing is found by searching a chat for marks. Knows text; knows no tokens.
"""

import re
from dataclasses import dataclass

from ..lines.endings import is_cut
from ..lines.inputs import LeftOut
from ..lines.json_text import is_blank, short
from ..lines.messages import is_asked
from ..lines.shapes import Message
from .dropped_parts import DROPPED, check_calls, missing_part
from .generation_marks import check_marks
from .template_habits import Habits, made_by_template, with_thought_in_content
from .templates import Renders, thought_of

SYSTEM_ROLES = ("system", "developer")
WEIGHT_KEYS = ("weight", "train")
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
OPENED = re.compile(r"<think>\s*\Z")
CLOSED = re.compile(r"</think>\s*\Z")
UNASKED = "not what the generation prompt asks for"
NO_QUESTION = "no question"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as text: `prompt` is not trained on, `text` is, up to its end mark."""

    turn: int
    prompt: str
    """What a server sends, and after it an empty thought where the template writes one."""
    text: str
    is_cut: bool
    """True where a limit ended it (`finish_reason` length): its end is not the target's."""


def find_answer(renders: Renders, habits: Habits, turn: int, end_marks: tuple[str, ...] = ()) -> Answer:
    """Raises LeftOut for a turn that is no answer, or that cannot be had after its own prompt.

    `end_marks` are the texts of the target's stop tokens; generation tags may leave them out.
    """
    message = renders.messages[turn]
    check_answer(message)
    before = asked_prompt(renders, habits, turn)
    if habits.takes_thoughts_in_content:
        message = with_thought_in_content(message)
    whole, spans = renders.whole(turn, message)
    text = whole[len(before) :] if whole.startswith(before) else answer_at_end(renders, habits, message, before, whole)
    if text is not None and opens_another_turn(message, text, habits.header):
        text = None
    rendered = text
    missing = None if text is None else missing_part(message, text, habits)
    if text is None or missing is not None:
        text = own_words(message, before, whole, habits)
        if text is None and missing is not None:
            raise LeftOut(DROPPED, f"{missing[:80]!r} is not in what it makes of the turn")
        if text is None:
            raise LeftOut(UNASKED, f"the prompt ends with {before[-40:]!r}")
    if message.get("tool_calls"):
        check_calls(renders, habits, turn, message, whole)
    made = 0 if thought_of(message) else made_by_template(habits, message, text)
    if spans is not None:
        start = len(whole) - len(rendered or visible(message["content"]).strip() + habits.closing)
        earliest = start - len(habits.generation_prompt)
        check_marks(message, whole, spans, start + made, earliest, (habits.closing.strip(), *end_marks))
    cut = is_cut(message)
    return Answer(turn, before + text[:made], without(habits.closing, text[made:]) if cut else text[made:], cut)


def asked_prompt(renders: Renders, habits: Habits, turn: int) -> str:
    """The prompt of a turn. Raises LeftOut where no server would have asked for that turn.

    Something before it must ask. Straight after an answer the template must open another: where it does not, as
    Mistral's, the prompt is at an end already.
    """
    messages = renders.messages
    if not is_asked(messages, turn):
        raise LeftOut(NO_QUESTION, "no user turn and no tool result comes before the answer")
    if not habits.asks:
        raise LeftOut("template writes no generation prompt", f"it opens answers with {short(habits.header)}")
    prompt = renders.prompt(turn)
    said = next(before["role"] for before in reversed(messages[:turn]) if before["role"] not in SYSTEM_ROLES)
    if said == "assistant" and renders.text(messages[:turn], is_prompt=False) == prompt:
        raise LeftOut(NO_QUESTION, "it follows an answer, and the template asks for no other there")
    return prompt


def opens_another_turn(message: Message, text: str, header: str) -> bool:
    """True where the template writes a header that the prompt did not, as some do after a tool's result."""
    return (
        bool(header.strip()) and text.startswith(header) and not message["content"].lstrip().startswith(header.strip())
    )


def answer_at_end(renders: Renders, habits: Habits, message: Message, before: str, whole: str) -> str | None:
    """The answer where the template rewrote what stands before it: as after a bare question, and so in the whole.

    None where the template asks or answers differently there.
    """
    asked: Message = {"role": "user", "content": ""}
    bare = renders.text([asked], is_prompt=True)
    answered = renders.text([asked, message], is_prompt=False)
    asks = habits.generation_prompt
    if not asks or not bare.endswith(asks) or not before.endswith(asks) or not answered.startswith(bare):
        return None
    text = answered[len(bare) :]
    return text if text and whole.endswith(asks + text) else None


def own_words(message: Message, before: str, whole: str, habits: Habits) -> str | None:
    """The content word for word after a prompt that it continues, with its thought, and the template's closing.

    None where the content holds no thought of its own, or is not the rest of what the prompt began.
    """
    content = message["content"]
    if "</think>" not in content or message.get("tool_calls") or CLOSED.search(before):
        return None
    said = visible(content)
    if whole.endswith(said + habits.closing):
        own = content.lstrip()
    elif whole.endswith(said.strip() + habits.closing):
        own = content.strip()
    else:
        return None
    opening = OPENED.search(before)
    if opening is None:
        return own + habits.closing if own.startswith("<think>") else None
    return own.removeprefix(opening.group() if own.startswith(opening.group()) else "<think>") + habits.closing


def without(closing: str, text: str) -> str:
    """The text of a cut answer, which the target did not close."""
    if not closing.strip():
        return text.removesuffix(closing)
    return text.rstrip().removesuffix(closing.strip()) if text.rstrip().endswith(closing.strip()) else text


def visible(content: str) -> str:
    """What a reader is shown of a content: the rest after its last thought."""
    return content.rpartition("</think>")[2]


def check_answer(message: Message) -> None:
    """Raises LeftOut for a turn that says nothing: a tool call is an answer, a thought alone is none.

    A turn of weight 0 is left out as well: in OpenAI's format it is there to be read, not trained on.
    """
    if not is_trained(message):
        raise LeftOut("weight 0", "the message's own weight")
    if message.get("tool_calls"):
        return
    content = message["content"]
    if is_blank(content):
        reason = "thought without an answer" if thought_of(message) else "empty answer"
        raise LeftOut(reason, f"content is {content[:40]!r}")
    ends_thought = "</think>" in content and "<think>" not in content
    if is_blank(THOUGHT.sub("", content)) or (ends_thought and is_blank(visible(content))):
        raise LeftOut("thought without an answer", f"content is {content[:40]!r}")


def is_trained(message: Message) -> bool:
    """What the message's own `weight`, or `train` as other tools call it, says: 1 and true, or 0 and false.

    Raises LeftOut for any other weight, and where the two disagree.
    """
    given = {key: message[key] for key in WEIGHT_KEYS if message.get(key) is not None}
    for key, weight in given.items():
        if isinstance(weight, str) or weight not in (0, 1):
            raise LeftOut("unknown weight", f"{key} is {short(weight)}, expected 0 or 1")
    if len(set(given.values())) > 1:
        raise LeftOut("shapes disagree", f"weight {short(given['weight'])} and train {short(given['train'])}")
    return bool(next(iter(given.values()), True))
