"""Tokenizers that know the marks of eight families of targets, and the chats that their golden texts are of."""

from datetime import datetime
from pathlib import Path
from typing import Any

from dflash_offline.extract.chats.chat import ChatRenderer, Sample
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat
from dflash_offline.extract.targets.facts import TextSide, tokenizer_facts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TODAY = datetime(2026, 1, 2)

# The first special is what a text begins with, the second what ends an answer. Then the others; then added tokens
# that are not special; then the specials, beside the second, that stop the target as its generation config says.
CHATML = (
    "<|endoftext|> <|im_end|> <|im_start|>",
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
    "<|endoftext|>",
)
MARKS: dict[str, tuple[str, str, str]] = {
    "qwen3": CHATML,
    "qwen3_5": CHATML,
    "llama3_1": (
        "<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|> <|end_of_text|>",
        "",
        "<|end_of_text|> <|eom_id|>",
    ),
    "gemma3": ("<bos> <eos> <start_of_turn> <end_of_turn>", "", "<end_of_turn>"),
    "gptoss": (
        "<|startoftext|> <|return|> <|start|> <|end|> <|message|> <|channel|> <|call|> <|constrain|> <|endoftext|>",
        "",
        "<|call|> <|endoftext|>",
    ),
    "glm4_5": (
        "[gMASK] <|endoftext|> <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        "<|user|> <|observation|>",
    ),
    "mistral_v3": (
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        "",
        "",
    ),
    "deepseek_r1": (
        "<{bar}begin_of_sentence{bar}> <{bar}end_of_sentence{bar}> <{bar}User{bar}> <{bar}Assistant{bar}> "
        "<{bar}tool_calls_begin{bar}> <{bar}tool_calls_end{bar}> <{bar}tool_call_begin{bar}> <{bar}tool_call_end{bar}> "
        "<{bar}tool_outputs_begin{bar}> <{bar}tool_outputs_end{bar}> <{bar}tool_output_begin{bar}> "
        "<{bar}tool_output_end{bar}> <{bar}tool_sep{bar}>",
        "<think> </think>",
        "",
    ),
}

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHATS: dict[str, Chat] = {
    "plain": Chat(
        [said("system", "Be brief."), said("user", "Hi?"), said("assistant", "Yo."), said("user", "And?")]
        + [said("assistant", "So.")],
        None,
    ),
    "thoughts": Chat(
        [said("user", "Odd?"), said("assistant", "Yes.", reasoning_content="9 is."), said("user", "Even?")]
        + [said("assistant", "No.", reasoning_content="Still 9.")],
        None,
    ),
    "thought in content": Chat([said("user", "Odd?"), said("assistant", "<think>\n9 is.\n</think>\n\nYes.")], None),
    "tools": Chat(
        [said("user", "1+2?"), said("assistant", "", tool_calls=[CALL])]
        + [said("tool", "3", name="add", tool_call_id="call00001"), said("assistant", "It is 3.")],
        [ADD],
    ),
    "thoughtful tools": Chat(
        [said("user", "1+2?"), said("assistant", "", tool_calls=[CALL], reasoning_content="Add.")]
        + [said("tool", "3", name="add", tool_call_id="call00001")]
        + [said("assistant", "It is 3.", reasoning_content="Got it.")],
        [ADD],
    ),
    "cut": Chat([said("user", "Count."), said("assistant", "1, 2,", finish_reason="length")], None),
}


def side_of(family: str, template: str) -> TextSide:
    """One id per byte, and the family's own marks."""
    texts = [text.replace("_", "\u2581").format(bar="\uff5c") if "{bar}" in text else text for text in MARKS[family]]
    specials, added, stops = (text.split() for text in texts)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(specials + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=specials[0], eos_token=specials[1], additional_special_tokens=specials[2:]
    )
    tokenizer.add_tokens(added)
    tokenizer.chat_template = template
    facts = tokenizer_facts(tokenizer)
    return TextSide(
        name=family,
        tokenizer=tokenizer,
        tokenizer_sha256=facts["tokenizer_sha256"],
        template_sha256=facts["template_sha256"],
        special_ids=facts["special_ids"],
        eos_ids=(*facts["eos_ids"], *(tokenizer.get_vocab()[stop] for stop in stops)),
        vocab_size=len(tokenizer),
        max_positions=2**20,
    )


def our_template(family: str) -> str:
    return (HERE / f"{family}.jinja").read_text(encoding="utf-8")


def shown(renderer: ChatRenderer, sample: Sample) -> str:
    """The text of a sample with [[ ]] around what is trained on."""
    text, inside, run = "", False, []
    for token, trained in [*zip(sample.ids, sample.mask), (None, False)]:
        if trained != inside or token is None:
            text += renderer.encoder.decode(run) + ("[[" if trained else "]]" if inside else "")
            inside, run = trained, []
        run.append(token)
    return text


def outcome(renderer: ChatRenderer, chat: Chat) -> str:
    """All samples of a chat as one readable text, or why there are none; then the turns left out, if any."""
    try:
        rendered = renderer.render(chat)
    except LeftOut as fault:
        return f"left out: {fault.reason}\n"
    parts = [shown(renderer, sample) + "\n" for sample in rendered.samples]
    parts += [f"left out: {reason} ({count})\n" for reason, count in rendered.left_out.items()]
    return "----\n".join(parts)
