"""Complete DATA folders of a few samples, and a byte-level tokenizer whose tokens hold halves of characters."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from dflash_offline.extract.data import Data, write_data
from dflash_offline.extract.targets.facts import read_text_side
from dflash_offline.store.samples import SampleTable, SampleWriter

MERGES = [("a", "\u00f0"), ("\u0141", "\u013a"), ("\u00c3", "\u00a9"), ("h", "i")]  # a F0, 9F 98, a whole e-acute, hi
MakeData = Callable[..., Path]


@pytest.fixture(scope="session")
def halves_target(case_target: Any, character_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target (tokenizer and config, no weights) with tokens that end or begin inside a character."""
    folder = tmp_path_factory.mktemp("halves")
    character_tokenizer("plain", MERGES).save_pretrained(folder)
    (folder / "config.json").write_bytes((case_target() / "config.json").read_bytes())
    return folder


@pytest.fixture
def make_data(tmp_path: Path) -> MakeData:
    """make_data(samples, target="tiny", **facts): a sample is a dict of what SampleWriter.add takes."""

    def make(samples: Sequence[dict[str, Any]], target: str | Path = "tiny", **facts: Any) -> Path:
        folder = tmp_path / "data"
        side = read_text_side(str(target))
        with SampleWriter(folder) as writer:
            for number, sample in enumerate(samples):
                told = {"split": "train", "task": "chat", "source": "chats.jsonl", "source_line": number + 1} | sample
                writer.add(told.pop("ids"), told.pop("mask"), **told)
        named = {"target": str(target), "tokenizer_sha256": side.tokenizer_sha256, "longest": 1024} | facts
        write_data(folder, Data(json.loads(json.dumps(named)), {}, SampleTable(folder).fingerprint()))
        return folder

    return make


@pytest.fixture(scope="session")
def spelled() -> Callable[..., dict[str, Any]]:
    """spelled(tokenizer, ("no", False), ("yes", True)): a sample of these texts, each trained on or not."""

    def make(tokenizer: Any, *parts: tuple[str, bool], **told: Any) -> dict[str, Any]:
        ids: list[int] = []
        mask: list[bool] = []
        for text, is_trained in parts:
            new = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += new
            mask += [is_trained] * len(new)
        return {"ids": ids, "mask": mask, **told}

    return make
