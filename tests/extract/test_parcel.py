"""Outcomes as they travel between processes, against the same outcomes made and taken in one."""

import hashlib
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.lines.inputs import chunks
from dflash_offline.extract.lines.shapes import KEYS
from dflash_offline.extract.parcel import Arrived, Parcel, packed
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.targets.facts import TextSide
from dflash_offline.extract.work import Maker, Outcome
from dflash_offline.store.samples import SampleTable


def lines() -> list[dict[str, Any]]:
    """Whole and cut samples, chats of several samples, answers and lines that are left out, tools that nobody reads."""
    draw = random.Random(5)
    found: list[dict[str, Any]] = []
    for number in range(40):
        n = draw.randrange(3, 90)
        ids = [draw.randrange(6, 262) for _ in range(n)]
        mask = [int(draw.random() < 0.7) for _ in range(n)]
        found.append({"id": number, "input_ids": ids, "loss_mask": mask, "task": draw.choice("xyz")})
        turns = [
            turn for i in range(3) for turn in (("user", f"q{i} {number}"), ("assistant", "a" * draw.randrange(9)))
        ]
        found.append({"messages": [{"role": role, "content": text} for role, text in turns], "tools": TOOLS})
    found += [{"input_ids": [999_999], "loss_mask": [1]}, {"nothing": 1}, found[0], found[1]]
    return found


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def as_plain(found: Outcome) -> list[Any]:
    """All that an outcome holds, as values that compare."""
    samples = [
        (s.made.ids.tolist(), s.made.mask.tolist(), s.made.num_recorded, s.made.sha256, s.made.crc32c)
        + (s.num_given, s.num_trained, s.made.num_anchors, s.is_cut)
        for s in found.samples
    ]
    return [
        (found.number, found.name, found.num_replaced, found.split, found.task, found.origin),
        (repr(found.fault), [(n, repr(fault)) for n, fault in found.samples_left_out + found.turns_left_out]),
        (found.unread_options, dict(found.noted), samples),
    ]


def unpacked(parcel: Parcel) -> list[Outcome]:
    arrived = Arrived(parcel)
    return [arrived.outcome(place) for place in range(len(arrived))]


def test_a_parcel_gives_back_what_was_packed(
    tmp_path: Path, text_side: Callable[..., TextSide], write_lines: Any
) -> None:
    source = Path(write_lines(tmp_path / "in.jsonl", lines()))
    config = PrepareConfig(min_trained=2, turns="each")
    maker = Maker(config, text_side("plain"), longest=80)
    outcomes = [found for chunk in chunks(source, KEYS) for found in maker.make(chunk)]
    assert any(found.fault for found in outcomes)
    assert any(found.samples_left_out for found in outcomes)
    assert any(found.turns_left_out for found in outcomes)
    assert any(found.noted for found in outcomes)
    assert max(len(found.samples) for found in outcomes) == 3
    arrived = unpacked(pickle.loads(pickle.dumps(packed(outcomes))))
    assert list(map(as_plain, arrived)) == list(map(as_plain, outcomes))
    assert unpacked(packed([])) == []
    assert list(map(as_plain, unpacked(packed(outcomes[-4:-2])))) == list(map(as_plain, outcomes[-4:-2]))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_token_file_says_of_each_sample_what_its_ids_and_mask_say(
    tmp_path: Path, case_target: Any, write_lines: Any, processes: int
) -> None:
    """Whoever counted it: hashes, checksums and counts are those of the ids and masks that lie there."""
    source = write_lines(tmp_path / "in.jsonl", lines())
    made = prepare(
        PrepareConfig(target=str(case_target()), out=str(tmp_path / "data"), min_trained=2, processes=processes),
        [source],
    )
    table = SampleTable(tmp_path / "data")
    columns = {name: table.column(name).tolist() for name in ("content", "crc32c", "num_tokens", "num_recorded")}
    num_trained = num_anchors = 0
    for row in range(len(table)):
        ids, mask = table.tokens(row)
        data = ids.astype("<u4").tobytes() + mask.astype(np.uint8).tobytes()
        anchors = [i for i in range(len(ids) - 1) if mask[i] and mask[i + 1]]
        assert columns["content"][row] == int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
        assert columns["crc32c"][row] == google_crc32c.value(data)
        assert (columns["num_tokens"][row], columns["num_recorded"][row]) == (len(ids), anchors[-1] + 1)
        num_trained, num_anchors = num_trained + int(mask.sum()), num_anchors + len(anchors)
    counts = json.loads((tmp_path / "data" / "data.json").read_text())["report"]
    assert (counts["trained_tokens"], counts["anchors"]) == (num_trained, num_anchors)
    assert (counts["samples"], counts["left_out"]["duplicate"]) == (len(table), 2)
    assert made.counts == counts
