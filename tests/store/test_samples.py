"""Eligible anchors, and samples through Arrow files and back."""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from dflash_offline import UserError
from dflash_offline.store.samples import (
    MadeSample,
    SampleTable,
    SampleWriter,
    eligible_anchors,
    made_sample,
    recorded_length,
    recorded_range,
)
from dflash_offline.store.tokens_file import SampleRun
from hypothesis import given
from hypothesis import strategies as st

Sample = tuple[list[int], list[int], str]
SAMPLES: list[Sample] = [
    ([5, 6, 7, 8], [0, 1, 1, 1], "train"),
    ([9], [1], "heldout"),
    ([2**32 - 1, 0, 1], [1, 1, 0], "train"),
    (list(range(500)), [0] * 400 + [1] * 100, "train"),
    ([5, 6, 7, 8], [0, 0, 0, 0], "other"),
]


def write(folder: Path, samples: list[Sample], rows_per_file: int = 2) -> SampleTable:
    with SampleWriter(folder, rows_per_file=rows_per_file) as writer:
        for number, (ids, mask, split) in enumerate(samples):
            writer.add(ids, mask, split=split, task=f"task {number % 2}", source="ä.jsonl", source_line=number)
    return SampleTable(folder)


@given(st.lists(st.booleans(), max_size=12))
def test_eligible_anchors_are_pairs_of_trained_tokens(mask: list[bool]) -> None:
    expected = [a + 1 < len(mask) and mask[a] and mask[a + 1] for a in range(len(mask))]
    assert eligible_anchors(np.array(mask, dtype=bool)).tolist() == expected
    assert recorded_length(np.array(mask, dtype=bool)) == max((a + 1 for a, e in enumerate(expected) if e), default=0)


@given(st.lists(st.booleans(), max_size=40), st.none() | st.integers(1, 45))
def test_recorded_are_the_tokens_that_some_drafter_may_read(mask: list[bool], window: int | None) -> None:
    """Every token within the window of some anchor, and whatever lies between two such tokens or up to the last."""
    anchors = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    read = [t for t in range(len(mask)) if any(t <= a and (window is None or a - t <= window) for a in anchors)]
    first, n = recorded_range(np.array(mask, dtype=bool), window)
    assert (first, n) == ((read[0], read[-1] + 1 - read[0]) if read else (0, 0))
    assert recorded_length(np.array(mask, dtype=bool)) == (first + n if anchors else 0)


@pytest.mark.parametrize("rows_per_file", [1, 7, 100])
def test_first_anchors_of_all_files_are_those_of_each_mask(tmp_path: Path, rows_per_file: int) -> None:
    draw = np.random.default_rng(3)
    masks = [draw.random(draw.integers(1, 12)) < 0.4 for _ in range(40)]
    masks += [np.ones(3, dtype=bool), np.ones(1, dtype=bool), np.zeros(5, dtype=bool)]
    samples = [([7] * len(mask), mask.astype(int).tolist(), "train") for mask in masks]
    found = write(tmp_path, samples, rows_per_file).first_anchors()
    assert found.tolist() == [next(iter(np.flatnonzero(eligible_anchors(mask)).tolist()), -1) for mask in masks]
    assert -1 in found
    assert SampleTable(tmp_path).first_anchors().dtype == np.int64
    assert write(tmp_path / "none", []).first_anchors().tolist() == []


@pytest.mark.parametrize("rows_per_file", [1, 2, 100])
def test_samples_come_back_as_they_were_added(tmp_path: Path, rows_per_file: int) -> None:
    table = write(tmp_path, SAMPLES, rows_per_file)
    assert len(table) == len(SAMPLES)
    files, rows = table.places()
    for row, (ids, mask, _) in enumerate(SAMPLES):
        for got_ids, got_mask in (table.tokens(row), table.tokens_at(int(files[row]), int(rows[row]))):
            assert got_ids.dtype == np.uint32
            assert got_mask.dtype == np.bool_
            assert got_ids.tolist() == ids
            assert got_mask.tolist() == [bool(value) for value in mask]
    assert table.column("split").tolist() == [split for _, _, split in SAMPLES]
    assert table.column("task").tolist() == [f"task {number % 2}" for number in range(len(SAMPLES))]
    assert table.column("num_tokens").tolist() == [len(ids) for ids, _, _ in SAMPLES]
    assert table.column("num_recorded").tolist() == [recorded_length(np.array(mask)) for _, mask, _ in SAMPLES]
    assert table.column("source_line").tolist() == list(range(len(SAMPLES)))
    codes, names = table.codes("split")
    assert [names[code] for code in codes] == [split for _, _, split in SAMPLES]
    with pytest.raises(IndexError):
        table.tokens(len(SAMPLES))


def test_many_batches_in_one_file(tmp_path: Path) -> None:
    samples = [([number, number + 1], [1, 1], f"split {number // 900}") for number in range(2500)]
    table = write(tmp_path, samples, rows_per_file=10_000)
    assert len(table.batches) == 3
    assert table.column("split").tolist() == [split for _, _, split in samples]
    assert [table.tokens(row)[0].tolist() for row in (0, 999, 1000, 2499)] == [[n, n + 1] for n in (0, 999, 1000, 2499)]


def test_the_fingerprint_is_content_and_order_only(tmp_path: Path) -> None:
    same = {write(tmp_path / str(rows), SAMPLES, rows).fingerprint() for rows in (1, 2, 100)}
    assert len(same) == 1
    swapped = [SAMPLES[1], SAMPLES[0], *SAMPLES[2:]]
    masked = [(SAMPLES[0][0], [0, 0, 1, 1], "train"), *SAMPLES[1:]]
    moved = [*SAMPLES[:3], (SAMPLES[3][0], SAMPLES[3][1], "heldout"), SAMPLES[4]]
    token = [([5, 6, 7, 9], SAMPLES[0][1], "train"), *SAMPLES[1:]]
    others = [write(tmp_path / f"other{i}", s).fingerprint() for i, s in enumerate((swapped, masked, moved, token))]
    assert len({*others, *same}) == 5


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, SAMPLES)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_opening_and_looking_up_copies_no_tokens(tmp_path: Path) -> None:
    samples = [(list(range(20_000)), [1] * 20_000, "train")] * 40
    write(tmp_path, samples, rows_per_file=10)
    before = pa.total_allocated_bytes()
    table = SampleTable(tmp_path)
    ids, _ = table.tokens(25)
    assert pa.total_allocated_bytes() - before < 100_000  # the tokens alone are 3.2 MB
    assert not ids.flags.owndata
    assert not ids.flags.writeable


def test_a_shorter_second_run_leaves_no_old_samples(tmp_path: Path) -> None:
    assert len(write(tmp_path, SAMPLES, 1)) == 5
    (tmp_path / "tokens-00000.arrow.tmp.box.1").touch()
    assert len(write(tmp_path, SAMPLES[:2], 1)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens-00000.arrow", "tokens-00001.arrow"]


def test_an_exception_leaves_no_unfinished_file(tmp_path: Path) -> None:
    with suppress(RuntimeError), SampleWriter(tmp_path, rows_per_file=2) as writer:
        for line in range(3):
            writer.add([1, 2], [1, 1], split="train", task="", source="", source_line=line)
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["tokens-00000.arrow"]


def test_no_samples_are_a_table_of_none(tmp_path: Path) -> None:
    table = write(tmp_path, [])
    assert len(table) == 0
    assert table.column("split").tolist() == []
    assert table.column("num_tokens").dtype == np.int32
    assert len(table.fingerprint()) == 64


@pytest.mark.parametrize(
    "ids, mask", [([], []), ([1, 2], [1]), ([-1], [1]), ([2**32], [1]), ([1.5], [1]), ([[1, 2]], [[1, 1]])]
)
def test_what_is_no_sample_is_refused(tmp_path: Path, ids: list, mask: list) -> None:
    writer = SampleWriter(tmp_path)
    with pytest.raises(ValueError):
        writer.add(ids, mask, split="train", task="", source="", source_line=0)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokens-00000.arrow"):
        SampleTable(tmp_path)
    write(tmp_path, SAMPLES, 1)
    (tmp_path / "tokens-00003.arrow").rename(tmp_path / "aside")
    with pytest.raises(UserError, match="tokens-00003.arrow"):
        SampleTable(tmp_path)
    data = (tmp_path / "aside").read_bytes()
    (tmp_path / "tokens-00003.arrow").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="tokens-00003.arrow.*no whole token file"):
        SampleTable(tmp_path)


def test_a_flipped_bit_in_the_tokens_names_file_and_row(tmp_path: Path, small: ModuleType) -> None:
    table = small.make_samples(tmp_path, 8, rows_per_file=4)
    needle = np.asarray(table.tokens(5)[0]).tobytes()
    path = tmp_path / "tokens-00001.arrow"
    data = bytearray(path.read_bytes())
    place = data.find(needle)
    assert place > 0
    data[place + 9] ^= 4
    path.write_bytes(data)
    damaged = SampleTable(tmp_path)
    assert damaged.tokens(4)[0].tolist() == table.tokens(4)[0].tolist()
    with pytest.raises(UserError, match="tokens-00001.arrow.*row 5"):
        damaged.tokens(5)


def test_a_flipped_bit_anywhere_else_in_a_token_file_names_the_file(tmp_path: Path, small: ModuleType) -> None:
    """Arrow's own metadata and the other columns; unchecked, some of these end the process."""
    table = small.make_samples(tmp_path, 6, rows_per_file=6)
    path = tmp_path / "tokens-00000.arrow"
    data = path.read_bytes()
    expected = [table.tokens(row) for row in range(6)]
    num_in_tokens = 0
    for place in range(0, len(data), 23):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        aside = path.with_name("aside")
        aside.write_bytes(changed)
        aside.replace(path)  # the old bytes stay mapped by the tables of before
        try:
            damaged = SampleTable(tmp_path)
        except UserError as error:
            found = error.happened
        else:  # the bit is one of a sample's ids or mask
            num_in_tokens += 1
            found = "".join(outcome(damaged, row, *expected[row]) for row in range(6))
        assert "tokens-00000.arrow" in found
    assert 10 < num_in_tokens < len(data) // 23 - 100


def outcome(table: SampleTable, row: int, ids: np.ndarray, mask: np.ndarray) -> str:
    """What happens when a sample is looked up that may be damaged; nothing where it is right."""
    try:
        found = table.tokens(row)
    except UserError as error:
        return error.happened
    assert np.array_equal(found[0], ids)
    assert np.array_equal(found[1], mask)
    return ""


@pytest.mark.parametrize("length", [0, 10, 9000, -1])
def test_a_cut_token_file_is_named(tmp_path: Path, small: ModuleType, length: int) -> None:
    small.make_samples(tmp_path, 6, rows_per_file=6)
    path = tmp_path / "tokens-00000.arrow"
    data = path.read_bytes()[:length]
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"tokens-00000\.arrow.*no whole token file"):
        SampleTable(tmp_path)


def test_very_many_batches_spill_into_the_next_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_offline.store.tokens_file.BATCH_SAMPLES", 1)
    samples = [([number] * 30, [1] * 30, "train") for number in range(300)]
    table = write(tmp_path, samples, rows_per_file=10_000)
    assert len(table.paths) == 3
    assert [int(table.tokens(row)[0][0]) for row in range(300)] == list(range(300))


def test_origin_and_metadata_stand_in_every_file(tmp_path: Path) -> None:
    said = {"facts": '{"a": "\\u00e4"}', "facts_sha256": "0" * 64}
    with SampleWriter(tmp_path, rows_per_file=2, metadata=said) as writer:
        for line, origin in enumerate(["target greedy", "elsewhere", "target T=0.7"]):
            writer.add([1, 2, 3], [0, 1, 1], split="train", task="", source="", source_line=line, origin=origin)
    table = SampleTable(tmp_path)
    assert table.column("origin").tolist() == ["target greedy", "elsewhere", "target T=0.7"]
    assert table.metadata == said
    for path in tmp_path.glob("*.arrow"):
        found = {key.decode(): value.decode() for key, value in pa.ipc.open_file(path).schema.metadata.items()}
        assert found.items() >= said.items()


def test_flipped_bits_in_the_metadata_are_found(tmp_path: Path) -> None:
    with SampleWriter(tmp_path, metadata={"facts": "x" * 5000}) as writer:
        writer.add([1, 2, 3], [0, 1, 1], split="train", task="", source="", source_line=1)
    (path,) = tmp_path.glob("*.arrow")
    data = bytearray(path.read_bytes())
    data[data.index(b"x" * 5000) + 2500] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="do not match their checksum"):
        SampleTable(tmp_path)


def test_trained_tokens_are_those_of_the_masks(tmp_path: Path) -> None:
    table = write(tmp_path, SAMPLES, rows_per_file=3)
    assert table.trained_tokens().tolist() == [int(table.tokens(row)[1].sum()) for row in range(len(table))]


@pytest.mark.parametrize("rows_per_file", [4, 10, 1000])
def test_runs_give_the_files_of_samples_added_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_file: int
) -> None:
    """Wherever a run begins and ends: batches and files end behind the same sample."""
    monkeypatch.setattr("dflash_offline.store.tokens_file.BATCH_SAMPLES", 7)
    monkeypatch.setattr("dflash_offline.store.tokens_file.BATCH_TOKENS", 90)
    monkeypatch.setattr("dflash_offline.store.tokens_file.MAX_BATCHES", 3)
    draw = np.random.default_rng(rows_per_file)
    samples = []
    for line in range(300):
        mask = draw.random(int(draw.integers(1, draw.choice([4, 30, 200])))) < 0.7
        made = made_sample(draw.integers(0, 1000, len(mask)).astype("<u4"), mask)
        samples.append((made, (str(draw.choice(["train", "heldout"])), "", f"s{line // 100}", "elsewhere"), 3 * line))
    cuts = [0, *sorted(draw.choice(301, 40, replace=False).tolist()), 300]
    for name in ("one", "runs"):
        with SampleWriter(tmp_path / name, rows_per_file) as writer:
            for first, last in pairwise(cuts):
                if name == "runs" and first < last and first % 3:
                    writer.add_run(run_of(samples[first:last]))
                    continue
                for made, texts, line in samples[first:last]:
                    writer.add_made(made, texts, line)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) > 14
    assert names == sorted(path.name for path in (tmp_path / "runs").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "runs" / name).read_bytes()


def run_of(samples: list[tuple[MadeSample, tuple[str, ...], int]]) -> SampleRun:
    made = [one for one, _, _ in samples]
    return SampleRun(
        ids=np.concatenate([one.ids for one in made]),
        mask=np.concatenate([one.mask for one in made]),
        lengths=np.array([len(one.ids) for one in made]),
        num_recorded=np.array([one.num_recorded for one in made]),
        contents=np.array([int.from_bytes(one.sha256[:8], "little") for one in made], dtype=np.uint64),
        crc32c=np.array([one.crc32c for one in made]),
        texts=[texts for _, texts, _ in samples],
        source_lines=[line for _, _, line in samples],
    )
