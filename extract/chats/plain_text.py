"""A line of plain text that the target goes on with, as a completions server would read it.

No chat template is involved: the tokenizer adds its own opening tokens, and every token after the first is trained
on. Text that was rendered with a chat template beforehand is refused: its prompts would be trained on as well.
"""

import re

from ..lines.inputs import LeftOut
from ..targets.facts import TextSide
from .chat import Sample

SHOWN = 40
FOREIGN_ANSWER = re.compile(
    r"<\|im_start\|>assistant|<\|start_header_id\|>assistant|<\|(?:start\|>)?assistant|<start_of_turn>model|\[/INST\]"
    r"|<\uff5cAssistant\uff5c>"
)
"""Where an answer opens in other templates: ChatML, Llama 3, harmony and GLM, Gemma, Mistral, DeepSeek."""


def plain_sample(side: TextSide, text: str) -> Sample:
    """Ids of the whole text with a mask that is True from the second token on.

    Raises LeftOut for text that is blank, a single token, holds special tokens, which only templates write, or was
    rendered with another template.
    """
    if not text.strip():
        raise LeftOut("empty text", f"text is {text[:SHOWN]!r}")
    bare = side.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    special = set(side.special_ids)
    typed = next((token for token in bare if token in special), None)
    if typed is not None:
        mark = side.tokenizer.decode([typed])
        raise LeftOut("rendered chat in plain text", f"it holds {mark!r}; give chats as messages, not as text")
    if opening := FOREIGN_ANSWER.search(text):
        shown = f"{opening[0]!r} opens an answer of another template; give chats as messages, not as text"
        raise LeftOut("rendered chat in plain text", shown)
    ids = list(side.tokenizer(text, verbose=False)["input_ids"])
    if len(ids) < 2:
        raise LeftOut("text of one token", f"text is {text[:SHOWN]!r}, nothing follows its first token")
    return Sample(ids, [False] + [True] * (len(ids) - 1), [len(ids)])
