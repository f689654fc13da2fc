"""Tokenizing by stretches gives the ids of the whole text, for tokenizers of several kinds."""

from typing import Any

import pytest
from dflash_offline.extract.chats.encoding import Encoder
from dflash_offline.extract.targets.hf import load_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_end",
    "<think>",
    "<thin",
    "a",
    "b",
    " ",
    "  ",
    "\n",
    "ab",
    "\u2581",
    "<",
    "",
]


def sentencepiece_like(scheme: str | None) -> PreTrainedTokenizerFast:
    """A Metaspace tokenizer, or with None the older kind whose normalizer prepends the space mark."""
    alphabet = ["\u2581", "a", "b", "<", "|", "i", "m", "_", "e", "n", "d", "t", "h", "k", "s", "r", ">", "\n"]
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "\u2581")]
    symbols = ["<unk>", *alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges, unk_token="<unk>"))
    if scheme is None:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(character_tokenizer: Any) -> dict[str, Any]:
    stripping = character_tokenizer("plain")
    stripping.add_tokens([AddedToken("<strip>", rstrip=True, normalized=False)], special_tokens=True)
    return {
        "characters": character_tokenizer("plain"),
        "merges": character_tokenizer("plain", [("a", "b"), ("\u010a", "\u010a"), ("\u0120", "a")]),
        "packaged": load_tokenizer("tiny"),
        "first": sentencepiece_like("first"),
        "always": sentencepiece_like("always"),
        "prepend": sentencepiece_like(None),
        "stripping": stripping,
    }


@pytest.mark.parametrize("name", ["characters", "merges", "packaged", "first", "always", "prepend", "stripping"])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), max_size=4))
def test_stretches_equal_the_whole(tokenizers: dict[str, Any], name: str, texts: list[str]) -> None:
    tokenizer = tokenizers[name]
    encoder = Encoder(tokenizer)
    for text in [*texts, "".join(texts)]:
        assert encoder.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["characters", "merges", "packaged", "first", "always", "prepend", "stripping"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=6))
def test_texts_that_begin_alike_are_encoded_as_if_alone(
    tokenizers: dict[str, Any], name: str, parts: list[str]
) -> None:
    """As a chat's prompts are: each begins with the one before, or the last of them was rewritten."""
    texts = ["".join(parts[:count]) for count in range(len(parts) + 1)]
    texts += [text.replace("a", "") for text in texts]
    tokenizer = tokenizers[name]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert Encoder(tokenizer).encode_all(texts) == expected


def test_an_added_token_that_begins_with_another(character_tokenizer: Any) -> None:
    """As the runs of line ends are that Gemma's tokenizers hold: the next text may go on inside of one."""
    tokenizer = character_tokenizer("plain")
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (2, 3)])
    texts = ["a\n\n<|im_end|>", "a\n\n\nb", "a\n\n\nb<|im_end|>\n<|im_start|>", "a\n\n\nb<|im_end|>\n\n"]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert Encoder(tokenizer).encode_all(texts) == expected


def test_special_tokens_that_the_tokenizer_splits_are_not_cut_at() -> None:
    tokenizer = sentencepiece_like("always")
    tokenizer.split_special_tokens = True
    text = "a<|im_end|>b"
    assert Encoder(tokenizer).encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


class CountingCore:
    """Passes calls to a tokenizers.Tokenizer and notes the texts."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.calls: list[list[str]] = []

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.calls.append(texts)
        return self.core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_a_stretch_that_texts_share_is_tokenized_once(tokenizers: dict[str, Any]) -> None:
    encoder = Encoder(tokenizers["characters"])
    encoder.core = core = CountingCore(encoder.core)
    encoder.encode_all(["<|im_start|>ab", "<|im_start|>ab<|im_end|>\n", "<|im_start|>ab<|im_end|>\n<|im_start|>b"])
    assert core.calls == [["<|im_start|>ab", "<|im_end|>\n", "<|im_start|>b"]]


def test_truncation_and_padding_set_on_the_core_do_not_matter(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["characters"]
    tokenizer(["a b", "abab"], truncation=True, max_length=2, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation is not None
    assert len(Encoder(tokenizer).encode("abab")) == 4


def test_blank_ids(tokenizers: dict[str, Any]) -> None:
    encoder = Encoder(tokenizers["characters"])
    for text, expected in (("", True), ("\n", True), (" \n \n \n ", True), ("\n.", False), ("<|im_end|>", False)):
        assert encoder.is_blank(encoder.encode(text)) is expected
        assert encoder.is_blank(encoder.encode(text)) is expected


def test_tokens_that_take_blanks_along_are_not_cut_at(tokenizers: dict[str, Any]) -> None:
    assert Encoder(tokenizers["stripping"]).stretches("a<|im_end|>b") == ["a<|im_end|>b"]
