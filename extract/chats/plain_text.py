"""A line of plain text that the target goes on with, as a completions server would read it.

No chat template is involved: the tokenizer adds its own opening tokens, and every token after those, or after the
first where it adds none, is trained on. Text that was rendered with a chat template beforehand is refused: its prompts
would be trained on as well.
"""

import re

from ..lines.inputs import LeftOut
from ..lines.json_text import is_blank
from ..targets.facts import TextSide
from .chat import Sample
from .control_marks import first_mark

SHOWN = 40
FOREIGN_ANSWER = re.compile(
    r"<\|im_start\|>assistant|<\|start_header_id\|>assistant|<\|(?:start\|>)?assistant|<start_of_turn>model|\[/INST\]"
    r"|<\uff5cAssistant\uff5c>"
)
"""Where an answer opens in other templates: ChatML, Llama 3, harmony and GLM, Gemma, Mistral, DeepSeek."""


def plain_sample(side: TextSide, text: str) -> Sample:
    """Ids of the whole text with a mask that is True after the tokenizer's opening, or after the first token.

    The text was not ended by the target, so what the tokenizer puts after it (an eos) is cut off.
    Raises LeftOut for what `plain_ids` does, and for a text of which nothing follows anything.
    """
    ids, num_opening = plain_ids(side, text)
    start = max(num_opening, 1)
    if len(ids) <= start:
        raise LeftOut("text of one token", f"text is {text[:SHOWN]!r}, nothing follows its first token")
    return Sample(ids, [False] * start + [True] * (len(ids) - start), [len(ids)])


def plain_ids(side: TextSide, text: str) -> tuple[list[int], int]:
    """Ids as a completions server reads the text, and how many of them, the first, are the tokenizer's own.

    Raises LeftOut for text that is blank, holds special tokens, which only templates write, was rendered with
    another template, or is tokenized otherwise beside the tokenizer's own tokens than alone.
    """
    if is_blank(text):
        raise LeftOut("empty text", f"text is {text[:SHOWN]!r}")
    bare = list(side.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    typed = first_mark(bare, set(side.special_ids))
    if typed is not None:
        mark = side.tokenizer.decode([typed])
        raise LeftOut("rendered chat in plain text", f"it holds {mark!r}; give chats as messages, not as text")
    if opening := FOREIGN_ANSWER.search(text):
        shown = f"{opening[0]!r} opens an answer of another template; give chats as messages, not as text"
        raise LeftOut("rendered chat in plain text", shown)
    ids = list(side.tokenizer(text, verbose=False)["input_ids"])
    num_opening = next((n for n in range(len(ids) - len(bare) + 1) if ids[n : n + len(bare)] == bare), None)
    if num_opening is None:
        shown = f"alone it begins with tokens {bare[:4]}, with the tokenizer's own {ids[:4]}"
        raise LeftOut("text merges with the tokenizer's own tokens", shown)
    return ids[: num_opening + len(bare)], num_opening
