"""Small targets, and a tokenizer whose ids can be counted by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline.extract.targets.facts import TextSide, tokenizer_facts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CASES = Path(__file__).parents[1] / "cases"
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|mask|>"]
TOOL_TEMPLATE = """\
{%- if tools -%}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\n' + m['content'] -}}
{%- for call in m.get('tool_calls', []) -%}
{{- '[call ' + call['function']['name'] + ' ' + (call['function']['arguments'] | tojson) + ']' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

MakeTarget = Callable[..., Path]


def make_tokenizer(template: str | None, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """Six specials, then one id for each byte: 262 ids without merges, which come last."""
    merges = merges or []
    symbols = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<think>", "</think>", "<|mask|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def template_text(name: str) -> str:
    """One of the handed templates, or the one that renders tool calls."""
    return TOOL_TEMPLATE if name == "tools" else (CASES / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def case_config(name: str, **changes: Any) -> Any:
    fields = json.loads((CASES / "targets" / f"{name}.json").read_text(encoding="utf-8")) | changes
    fields = {key: value for key, value in fields.items() if not key.startswith("_")}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def write_target(folder: Path, config: Any, tokenizer: Any, seed: int = 0, **saving: Any) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **saving)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def case_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """case_target(template) or case_target(template, "t19-hybrid"): a folder made once."""
    made: dict[tuple[str, str], Path] = {}

    def make(template: str = "plain", config: str = "t16-tied") -> Path:
        key = (template, config)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{config}-{template}")
            made[key] = write_target(folder, case_config(config), make_tokenizer(template_text(template)))
        return made[key]

    return make


@pytest.fixture(scope="session")
def cases() -> Path:
    return CASES


@pytest.fixture(scope="session")
def character_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """character_tokenizer("plain") with a handed template, or with a template's own text."""

    def make(template: str | None, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
        is_name = template is not None and "{" not in template
        return make_tokenizer(template_text(template) if is_name and template else template, merges)

    return make


@pytest.fixture(scope="session")
def text_side(character_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> Callable[..., TextSide]:
    """text_side("plain"): what chat.py needs of a target, without a folder."""

    def make(template: str | None, merges: list[tuple[str, str]] | None = None) -> TextSide:
        tokenizer = character_tokenizer(template, merges)
        facts = tokenizer_facts(tokenizer)
        return TextSide(
            name="characters",
            tokenizer=tokenizer,
            tokenizer_sha256=facts["tokenizer_sha256"],
            template_sha256=facts["template_sha256"],
            special_ids=facts["special_ids"],
            eos_ids=facts["eos_ids"],
            vocab_size=320,
            max_positions=512,
        )

    return make


@pytest.fixture(scope="session")
def write_lines() -> Callable[[Path, list[Any]], str]:
    """write_lines(path, values): a JSONL file; gives its name as typed on a command line."""

    def write(path: Path, lines: list[Any]) -> str:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def chat() -> Callable[..., list[dict[str, str]]]:
    """chat("q", "a", ...): alternating user and assistant messages."""

    def make(*turns: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]

    return make
