"""Golden samples of eight families: `FAMILY.txt` is what `FAMILY.jinja` makes of the chats of `families.py`.

[[ ]] stands around what is trained on, ---- between two samples. The templates are minimal ones of our own;
tests/interop/test_real_templates.py holds them to the real ones.
"""

from pathlib import Path
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer

HERE = Path(__file__).parent
FAMILIES = sorted(path.stem for path in HERE.glob("*.jinja"))
WITHOUT = ", without thinking"


def golden(family: str) -> dict[str, str]:
    blocks = (HERE / f"{family}.txt").read_text(encoding="utf-8").split("== ")[1:]
    return {name: body.rstrip("\n") for name, _, body in (block.partition("\n") for block in blocks)}


CASES = [(family, name) for family in FAMILIES for name in golden(family)]


@pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}-{name}" for family, name in CASES])
def test_golden(families: Any, family: str, name: str) -> None:
    options = {"enable_thinking": False} if name.endswith(WITHOUT) else {}
    renderer = ChatRenderer(families.side_of(family, families.our_template(family)), options, now=families.TODAY)
    chat = families.CHATS[name.removesuffix(WITHOUT)]
    assert families.outcome(renderer, chat).rstrip("\n") == golden(family)[name]


def test_every_chat_has_a_golden_text_in_every_family(families: Any) -> None:
    assert set(FAMILIES) == set(families.MARKS)
    for family in FAMILIES:
        has_switch = "enable_thinking" in families.our_template(family)
        without = {name + WITHOUT for name in ("plain", "thoughts", "tools")} if has_switch else set()
        assert set(golden(family)) == set(families.CHATS) | without, family


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_token_follows_what_a_server_would_send(families: Any, family: str) -> None:
    """Slow reference: the ids before each answer are transformers' own prompt, an empty thought aside."""
    template = families.our_template(family).replace("strftime_now('%Y-%m-%d')", "'today'")
    side = families.side_of(family, template)
    renderer = ChatRenderer(side, {})
    num_answers = 0
    for name in ("plain", "thoughts", "thought in content"):
        chat = families.CHATS[name]
        prompts = [
            side.tokenizer.apply_chat_template(chat.messages[:turn], add_generation_prompt=True, return_dict=False)
            for turn, message in enumerate(chat.messages)
            if message["role"] == "assistant"
        ]
        if families.outcome(renderer, chat).startswith("left out"):
            continue
        for sample in renderer.render(chat).samples:
            starts = [i for i in range(1, len(sample.ids)) if sample.mask[i] and not sample.mask[i - 1]]
            assert len(starts) == len(sample.ends)
            for start in starts:
                num_answers += 1
                prompt = next(p for p in reversed(prompts) if sample.ids[: len(p)] == p and len(p) <= start)
                between = side.tokenizer.decode(sample.ids[len(prompt) : start])
                assert "".join(between.split()) in ("", "<think></think>", "</think>")
    assert num_answers >= 3
