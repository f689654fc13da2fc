"""Recoding: every bit against the stores read, whatever codec, taps, subset or merge was asked for."""

import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.cli import main
from dflash_offline.store import int8
from dflash_offline.store.config import RecodeConfig
from dflash_offline.store.files import FolderLock
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import Manifest, read_manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.recode import RecodeReport, measured_error, recode
from dflash_offline.store.recode_choice import Taken, rows_per_file, whole_bytes
from dflash_offline.store.recode_layout import check_space, needed_bytes
from dflash_offline.store.recode_plan import plan_recode
from dflash_offline.store.recode_worker import SourceReader
from dflash_offline.store.repair import repair
from dflash_offline.store.size import parse_size
from dflash_offline.store.state_error import error_text
from dflash_offline.store.summary import describe_store, read_facts
from dflash_offline.store.tokens_file import BATCH_SAMPLES, BATCH_TOKENS, MAX_BATCHES, content_sha256

NUM_SAMPLES = 24
Recode = Callable[..., tuple[Path, RecodeReport]]


@pytest.fixture(scope="module")
def whole(lab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete raw store of samples 0 to 23; read it, never change it."""
    return lab.make_store(tmp_path_factory.mktemp("whole"), range(NUM_SAMPLES))


@pytest.fixture
def made(tmp_path: Path) -> Recode:
    """made(store, ..., name="out", codec="zstd"): recodes into tmp_path/NAME with one worker."""

    def make(*stores: Path, name: str = "out", **settings: Any) -> tuple[Path, RecodeReport]:
        config = RecodeConfig(**({"out": str(tmp_path / name), "workers": 1} | settings))
        return tmp_path / name, recode(config, [str(store) for store in stores])

    return make


def rows_of(store: Path, array: str = "hidden") -> dict[int, bytes]:
    """The encoded rows of every sample by its number, as stored."""
    found = {}
    with StoreReader(store) as reader:
        geometry = reader.geometries[array]
        for i, line in enumerate(reader.samples.source_line.tolist()):
            out = np.empty((geometry.taps, int(reader.samples.n[i]), geometry.row_bytes), dtype=np.uint8)
            reader.read_rows(i, out, array=array)
            found[line] = out.tobytes()
    return found


def numbers_by_id(store: Path) -> dict[int, int]:
    samples = StoreReader(store).samples
    return dict(zip(samples.sample_id.tolist(), samples.source_line.tolist()))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def planned_bytes(store: Path, **settings: Any) -> int:
    """Bytes that a recode is expected to take at most."""
    plan = plan_recode(RecodeConfig(out=str(store.parent / "never"), **settings), [store])
    return whole_bytes(plan.sources[0], plan.manifest, plan.taken)


def segments_of(store: Path) -> dict[str, bytes]:
    """The content of every segment file by name."""
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for p in store.glob("*/c.*.0.0")}


def test_raw_to_zstd_and_back_gives_every_bit_by_sample_id(lab: ModuleType, whole: Path, made: Recode) -> None:
    packed, first = made(whole, name="packed", codec="zstd")
    back, second = made(packed, name="back", codec="raw")
    expected = lab.content(whole)
    assert lab.content(packed) == expected
    assert lab.content(back) == expected
    for store in (packed, back):
        assert not verify(store).faults
        assert read_manifest(store).data["facts"] == read_manifest(whole).data["facts"]
    assert numbers_by_id(whole) == numbers_by_id(back)
    assert [read_manifest(s).codec for s in (packed, back)] == ["zstd", "raw"]
    assert (first.num_samples, second.num_samples) == (NUM_SAMPLES, NUM_SAMPLES)
    assert first.bytes_before == sum(map(len, segments_of(whole).values()))
    assert second.bytes_after == sum(map(len, segments_of(back).values()))
    assert first.error is None
    assert measured_error(packed) is None


def test_the_order_is_that_of_content_and_the_bytes_do_not_depend_on_workers(whole: Path, made: Recode) -> None:
    one, _ = made(whole, name="one")
    three, report = made(whole, name="three", workers=3)
    assert report.num_workers == 3
    assert segments_of(one) == segments_of(three)
    reader = StoreReader(one)
    samples = map(reader.tokens, range(len(reader)))
    contents = [int.from_bytes(content_sha256(ids, mask.view(np.uint8))[:8], "little") for ids, mask in samples]
    assert contents == sorted(contents)


@pytest.mark.parametrize("codec", ["int8:4", "int8"])
def test_int8_is_what_extract_would_have_written(
    lab: ModuleType, whole: Path, made: Recode, tmp_path: Path, codec: str
) -> None:
    out, report = made(whole, codec=codec)
    extracted = lab.make_store(tmp_path / "extracted", range(NUM_SAMPLES), codec=read_manifest(out).codec)
    for array in ("hidden", "last"):
        assert rows_of(out, array) == rows_of(extracted, array)
    assert not verify(out).faults
    assert report.bytes_after == sum(map(len, segments_of(out).values()))


def test_the_measured_error_is_that_of_every_state(lab: ModuleType, whole: Path, made: Recode, tmp_path: Path) -> None:
    out, report = made(whole, codec="int8:4")
    errors = []
    for number in range(NUM_SAMPLES):
        for tap in (*lab.TAPS, -1):
            before = lab.states(number, tap)
            after = np.empty_like(before)
            int8.decode(int8.encode(before, 4), 4, after)
            for old, new in zip(int8.as_float(before), int8.as_float(after)):
                errors.append(np.linalg.norm(new.astype(float) - old) / np.linalg.norm(old.astype(float)))
    found = measured_error(out)
    assert found is not None
    assert found["num_states"] == len(errors)
    assert found["median"] == pytest.approx(np.median(errors), rel=0.01)
    assert found["worst"] == pytest.approx(max(errors), rel=1e-5)
    assert (found["codecs"], found["against"]) == (["int8:4"], ["raw"])
    assert f"{len(errors):,} states: median {found['median']:.3%}, worst {found['worst']:.3%}" in report.text()
    again, _ = made(whole, codec="int8:4")
    assert measured_error(again) == found
    raw, _ = made(out, name="raw", codec="raw")
    assert measured_error(raw) == found
    copied, _ = made(out, name="copied")
    assert rows_of(copied) == rows_of(out)
    assert measured_error(copied) == found
    path = copied / "state_errors.json"
    path.write_bytes(path.read_bytes().replace(b'"num_states": ', b'"num_states": 1'))
    with pytest.raises(UserError, match=r"state_errors\.json' is damaged"):
        measured_error(copied)


def test_int8_to_raw_holds_the_decoded_values(whole: Path, made: Recode, lab: ModuleType) -> None:
    small, _ = made(whole, name="small", codec="int8:4")
    raw, report = made(small, name="raw", codec="raw")
    assert lab.content(raw) == lab.content(small)
    assert lab.content(raw) != lab.content(whole)
    assert report.error is not None


def told_of(store: Path) -> dict[str, str]:
    """The lines of `inspect` by name."""
    lines = describe_store(read_facts(store)).split("\n\n")[0].splitlines()
    return {name.strip(): text for name, text in (re.split(r"  +", line, maxsplit=1) for line in lines)}


def test_an_earlier_loss_stays_however_often_a_store_is_recoded(whole: Path, made: Recode) -> None:
    stays = "; states were int8:4 before; that error stays"
    small, _ = made(whole, name="small", codec="int8:4")
    assert "before" not in told_of(small)["error"]
    raw, _ = made(small, name="raw", codec="raw")
    packed, _ = made(raw, name="packed", codec="zstd")
    for store in (raw, packed):
        assert told_of(store)["error"] == f"none{stays}"
        assert told_of(store)["measured"] == told_of(small)["measured"]
    copied, _ = made(small, name="copied")
    assert told_of(copied)["error"] == told_of(small)["error"]
    smaller, _ = made(packed, name="smaller", codec="int8:2")
    told, found, earlier = told_of(smaller), measured_error(smaller), measured_error(small)
    assert found is not None
    assert earlier is not None
    assert told["error"].endswith(stays)
    assert told["measured"].startswith("of int8:2 against zstd, relative L2 of ")
    assert told["before"] == error_text(earlier) == told_of(small)["measured"]
    assert [part | {"before": []} for part in found["before"]] == [earlier]
    again, _ = made(smaller, name="again")
    assert measured_error(again) == found


def test_a_loss_that_nobody_measured_is_said(lab: ModuleType, made: Recode, tmp_path: Path) -> None:
    small = lab.make_store(tmp_path / "small", range(6), codec="int8:4")
    raw, _ = made(small, name="raw", codec="raw")
    assert told_of(raw)["error"] == "none; states were int8:4 before; that error stays"
    assert told_of(raw)["measured"].startswith("unknown: ")
    assert told_of(raw)["measured"].endswith("`dflash recode` them to int8:4")
    smaller, _ = made(raw, name="smaller", codec="int8:2")
    assert told_of(smaller)["measured"].startswith("of int8:2 against raw, ")
    assert told_of(smaller)["not measured"].endswith("`dflash recode` them to int8:4")


@pytest.mark.parametrize(
    "settings", [{"limit": 20}, {"taps": (1, 9)}, {"last": False}, {"split": "train"}, {"codec": "raw", "limit": 20}]
)
def test_what_was_measured_of_more_states_is_not_said_of_these(
    whole: Path, made: Recode, settings: dict[str, Any]
) -> None:
    small, _ = made(whole, name="small", codec="int8:4")
    part, _ = made(small, name="part", **settings)
    found, earlier = measured_error(part), measured_error(small)
    assert earlier is not None
    assert found == earlier | {"is_own": False}
    assert "of int8:4 against raw in the stores it was made from, relative L2" in told_of(part)["measured"]
    copied, _ = made(part, name="copied")
    assert measured_error(copied) == found
    ordered, _ = made(small, name="ordered", taps=(17, 1, 9))
    assert measured_error(ordered) == earlier


def test_a_merged_store_names_what_was_not_measured(lab: ModuleType, made: Recode, tmp_path: Path) -> None:
    one, _ = made(lab.make_store(tmp_path / "a", range(0, 6)), name="one", codec="int8:4")
    two, _ = made(lab.make_store(tmp_path / "b", range(6, 12)), name="two", codec="int8:4")
    unknown = lab.make_store(tmp_path / "c", range(12, 18), codec="int8:4")
    both, _ = made(one, two, name="both")
    found, parts = measured_error(both), [measured_error(store) for store in (one, two)]
    assert found is not None
    assert found["num_states"] == sum(part["num_states"] for part in parts if part)
    assert (found["is_own"], found["unmeasured"]) == (True, [])
    merged, report = made(one, unknown, name="merged")
    found = measured_error(merged)
    assert found is not None
    name = f"plan {read_manifest(unknown).plan_sha256[:16]} (int8:4)"
    assert (found["is_own"], found["unmeasured"]) == (False, [name])
    assert f"in the stores it was made from, relative L2 of {found['num_states']:,} states" in report.text()
    assert report.error is not None
    assert f"; not measured: {name}" in told_of(merged)["measured"]


def test_the_next_command_is_quoted(whole: Path, made: Recode, tmp_path: Path) -> None:
    _, report = made(whole, name="s raw e", limit=2)
    assert report.text().splitlines()[-1] == f"next: dflash train --store '{tmp_path / 's raw e'}'"


def test_fewer_taps_in_the_asked_order_by_layer_number(lab: ModuleType, whole: Path, made: Recode) -> None:
    out, report = made(whole, taps=(17, 1), last=False)
    expected = lab.content(whole)
    manifest = read_manifest(out)
    assert (manifest.tap_layers, manifest.has_last) == ((17, 1), False)
    assert not (out / "last").exists()
    found = lab.content(out)
    assert found.keys() == expected.keys()
    for number, (ids, mask, texts, states, last) in found.items():
        assert (ids, mask, texts) == expected[number][:3]
        assert list(states.items()) == [(17, expected[number][3][17]), (1, expected[number][3][1])]
        assert last is None
    assert not verify(out).faults
    assert "taps 17, 1" in report.text()


def test_a_limit_takes_the_beginning_of_the_order(lab: ModuleType, whole: Path, made: Recode) -> None:
    everything = lab.numbers_of(made(whole, name="all")[0])
    seven, report = made(whole, name="seven", limit=7)
    assert lab.numbers_of(seven) == everything[:7]
    assert report.left_out == {"past --limit": NUM_SAMPLES - 7}
    assert f"left out: {NUM_SAMPLES - 7} past --limit" in report.text()
    assert lab.content(seven).items() <= lab.content(whole).items()
    assert len(list((seven / "plan").glob("tokens-*.arrow"))) == 1


def test_a_split_is_taken_alone_and_an_unknown_one_refused(lab: ModuleType, whole: Path, made: Recode) -> None:
    out, report = made(whole, split="heldout")
    held_out = [number for number in range(NUM_SAMPLES) if number % 5 == 4]
    assert sorted(lab.numbers_of(out)) == held_out
    assert report.left_out == {"in another split": NUM_SAMPLES - len(held_out)}
    with pytest.raises(UserError, match=r"split 'test' is in none[\s\S]*heldout, train"):
        made(whole, name="none", split="test")


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8:4"])
@pytest.mark.parametrize("budget", ["250kB", "600 kB"])
def test_a_subset_by_budget_fits_and_is_the_beginning_of_a_larger_one(
    lab: ModuleType, whole: Path, made: Recode, codec: str, budget: str
) -> None:
    out, report = made(whole, budget=budget, codec=codec)
    assert folder_bytes(out) <= parse_size(budget)
    everything = lab.numbers_of(made(whole, name="all", codec=codec)[0])
    taken = lab.numbers_of(out)
    assert taken == everything[: len(taken)]
    assert report.left_out["past --budget"] == NUM_SAMPLES - len(taken) > 0
    size_bytes = [planned_bytes(whole, codec=codec, limit=len(taken) + more) for more in (0, 1)]
    assert size_bytes[0] <= parse_size(budget) < size_bytes[1], "one more would have fitted"
    small_rest = 32_768 + 8192 * (report.num_segments + 4)  # the upper bounds of tokens and commits
    assert codec == "zstd" or size_bytes[0] - folder_bytes(out) <= small_rest


def test_a_budget_below_one_sample_is_refused_with_the_bytes(whole: Path, made: Recode) -> None:
    with pytest.raises(UserError, match=r"--budget 10kB is less than a store of one sample takes, .* bytes\)"):
        made(whole, budget="10kB")
    with pytest.raises(UserError, match="is not a size"):
        made(whole, budget="much")


def test_two_halves_become_the_store_of_the_whole(lab: ModuleType, whole: Path, made: Recode, tmp_path: Path) -> None:
    halves = [lab.make_store(tmp_path / f"half{k}", range(k, NUM_SAMPLES, 2), facts={"sources": [k]}) for k in (1, 0)]
    merged, report = made(*halves, name="merged")
    alone, _ = made(whole, name="alone")
    assert lab.content(merged) == lab.content(whole)
    assert lab.numbers_of(merged) == lab.numbers_of(alone)
    assert segments_of(merged) == segments_of(alone)
    assert not verify(merged).faults
    assert report.left_out == {}
    data = read_manifest(merged).data
    assert [s["plan_sha256"] for s in data["recoded"]["sources"].values()] == [
        read_manifest(h).plan_sha256 for h in halves
    ]
    assert [s["facts"] for s in data["recoded"]["sources"].values()] == [{"sources": [1]}, {"sources": [0]}]
    assert data["facts"] == lab.FACTS
    ids: dict[int, int] = {}
    for half, source in zip(halves, data["recoded"]["sources"].values()):
        ids |= {source["first_sample_id"] + sample_id: number for sample_id, number in numbers_by_id(half).items()}
    assert numbers_by_id(merged) == ids


def test_samples_of_several_stores_are_kept_once_from_the_first(
    lab: ModuleType, made: Recode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = lab.make_store(tmp_path / "first", [0, 1, 2, 3, 3])
    second = lab.make_store(tmp_path / "second", [2, 3, 4], version=1, splits={2: "heldout"}, facts={"held_out": 0.5})
    merged, report = made(first, second)
    assert sorted(lab.numbers_of(merged)) == [0, 1, 2, 3, 3, 4]
    assert report.left_out == {"in an earlier store too": 2}
    expected, found = lab.content(first), lab.content(merged)
    assert {number: found[number] for number in expected} == expected
    assert found[4] == lab.content(second)[4]
    err = capsys.readouterr().err
    assert "1 samples lie in different splits of these stores; the split of the first counts" in err
    assert "prepared with different held_out; the manifest keeps each" in err


def test_codecs_are_merged_when_one_is_asked_for(lab: ModuleType, made: Recode, tmp_path: Path) -> None:
    raw = lab.make_store(tmp_path / "raw", range(0, 6))
    int8_store = lab.make_store(tmp_path / "int8", range(6, 12), codec="int8:4", tap_layers=(17, 1))
    with pytest.raises(UserError, match="give --taps and --codec, so that they become alike") as caught:
        made(raw, int8_store)
    assert 'codec = "raw" in the first, "int8:4" in the second' in caught.value.happened
    merged, _ = made(raw, int8_store, codec="int8:4", taps=(1, 17))
    expected = rows_of(made(raw, name="a", codec="int8:4", taps=(1, 17))[0]) | rows_of(
        made(int8_store, name="b", taps=(1, 17))[0]
    )
    assert rows_of(merged) == expected
    found = measured_error(merged)
    assert found is not None
    assert found["num_states"] == 3 * sum(lab.length(number) - 1 for number in range(6))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"target": {"name": "tiny", "weights_sha256": "00" * 32, "vocab_size": 12}}, 'target.weights_sha256 = "abab'),
        ({"tap_layers": (9, 1, 17)}, "tap_layers = [1, 9, 17] in the first, [9, 1, 17] in the second"),
        ({"hidden_size": 40}, "hidden_size = 32 in the first, 40 in the second"),
        ({"has_last": False}, "has_last = true in the first, false in the second"),
        (
            {"facts": {"template_options": {"think": True}}},
            'data.facts.template_options.think = "(absent)" in the first, true in the second',
        ),
        ({"facts": {"tokenizer_sha256": "12"}}, "data.facts.tokenizer_sha256"),
    ],
)
def test_stores_of_other_identity_are_refused_with_both_values(
    lab: ModuleType, whole: Path, made: Recode, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    other = lab.make_store(tmp_path / "other", [30], **changes)
    with pytest.raises(UserError) as caught:
        made(whole, other)
    assert told in caught.value.happened
    assert str(other) in caught.value.happened
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    lab: ModuleType, whole: Path, made: Recode, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is given twice"):
        made(whole, whole)
    with pytest.raises(UserError, match="is given twice"):
        made(whole, out=str(whole))
    with pytest.raises(UserError, match=r"lies inside '.*', a store to read"):
        made(whole, out=str(whole / "sub" / "sub"))
    assert not (whole / "sub").exists()
    with pytest.raises(UserError, match="segment_positions = 4611686018427387904 is more than"):
        made(whole, segment_positions=2**62)
    with pytest.raises(UserError, match=r"tap 3 is not in .*\nexpected: some of its taps 1, 9, 17"):
        made(whole, taps=(1, 3))
    with pytest.raises(UserError, match=r"codec 'lz4' is unknown"):
        made(whole, codec="lz4")
    with pytest.raises(UserError, match=r"int8:32 cannot store rows of 32 values"):
        made(whole, codec="int8:32")
    with pytest.raises(UserError, match="no store at"):
        made(tmp_path / "nowhere")
    with pytest.raises(UserError, match="segment_positions = 64 is shorter than the longest sample"):
        made(whole, segment_positions=64)
    assert not (tmp_path / "out").exists()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'thesis.tex' and is no store[\s\S]*--out"):
        made(whole, name="foreign")


def test_other_settings_on_a_started_store_are_refused_with_both_values(
    lab: ModuleType, whole: Path, made: Recode, tmp_path: Path
) -> None:
    out, _ = made(whole, codec="zstd", limit=9)
    before = lab.small.tree(out)
    with pytest.raises(UserError, match=r'codec = "zstd" there, "raw" now[\s\S]*with --out'):
        made(whole, codec="raw", limit=9)
    with pytest.raises(UserError, match="data.recoded.limit = 9 there, 8 now"):
        made(whole, codec="zstd", limit=8)
    with pytest.raises(UserError, match=r"tap_layers = \[1, 9, 17\] there, \[9\] now"):
        made(whole, codec="zstd", limit=9, taps=(9,))
    other = lab.make_store(tmp_path / "other", range(NUM_SAMPLES), version=1)
    with pytest.raises(UserError, match=r"data.recoded.sources.1.snapshot = .* there, .* now"):
        made(other, codec="zstd", limit=9)
    assert lab.small.tree(out) == before
    _, again = made(whole, codec="zstd", limit=9)
    assert again.num_kept_segments == again.num_segments
    assert "0 written now" in again.text()
    assert lab.small.tree(out) == before


def test_a_resume_redoes_only_what_is_missing(lab: ModuleType, whole: Path, made: Recode) -> None:
    out, report = made(whole, codec="int8:4", limit=20)
    before, error = lab.small.tree(out), report.error
    (out / "commits" / "00000001.arrow").unlink()
    (out / "hidden" / "c.1.0.0.tmp.elsewhere.99").write_bytes(b"half")
    (out / "index.arrow").unlink()
    (out / "state_errors.json").unlink()
    (out / "plan" / "index.arrow").unlink()
    (out / "plan" / "tokens-00000.arrow").unlink()
    shutil.rmtree(out / "frozen")
    (out / ".tokens").mkdir()
    (out / ".tokens" / "tokens-00000.arrow").write_bytes(b"half")
    kept = (out / "hidden" / "c.0.0.0").stat().st_mtime_ns
    _, again = made(whole, codec="int8:4", limit=20)
    assert (again.num_kept_segments, again.error) == (report.num_segments - 1, error)
    assert (out / "hidden" / "c.0.0.0").stat().st_mtime_ns == kept
    assert lab.small.tree(out) == before


def test_an_incomplete_store_is_read_as_of_the_first_start(lab: ModuleType, made: Recode, tmp_path: Path) -> None:
    store = lab.make_store(tmp_path / "growing", range(NUM_SAMPLES), fill=[0, 1, 3])
    manifest = read_manifest(store)
    with pytest.raises(UserError, match="is not complete"):
        made(store)
    there = lab.content(store, partial=True)
    out, report = made(store, partial=True)
    assert lab.content(out) == there
    assert report.left_out == {"not committed": NUM_SAMPLES - len(there)}
    recoded = read_manifest(out).data["recoded"]["sources"]["1"]
    assert recoded["segments"] == "0-1,3"
    assert recoded["snapshot"] == StoreReader(store, partial=True).snapshot
    (out / "commits" / "00000000.arrow").unlink()
    (out / "index.arrow").unlink()
    lab.fill_segments(store, manifest, sorted(set(range(manifest.num_segments)) - {0, 1, 3}))
    _, again = made(store, partial=True)
    assert (again.num_samples, again.num_kept_segments) == (len(there), again.num_segments - 1)
    assert lab.content(out) == there
    with pytest.raises(UserError, match="has all its segments now; .* started from segments 0-1,3 of it") as caught:
        made(store)
    assert str(store) in caught.value.happened
    assert "--partial" in caught.value.advice
    for name in ("commits/00000003.arrow", "index.arrow"):
        (store / name).unlink()
    with pytest.raises(UserError, match=r"segment 3 of .* is not committed; .* started with segments 0-1,3 of"):
        made(store, partial=True)


@pytest.mark.parametrize("first_fill", [[0, 1, 2], None])
def test_parts_of_one_plan_are_recoded_again_and_resumed(
    lab: ModuleType, made: Recode, tmp_path: Path, first_fill: list[int] | None
) -> None:
    """Two stores of the same plan: both half filled, or the first of them whole."""
    num_segments = read_manifest(lab.make_store(tmp_path / "probe", range(NUM_SAMPLES), fill=[])).num_segments
    first = lab.make_store(tmp_path / "first", range(NUM_SAMPLES), fill=first_fill)
    second = lab.make_store(tmp_path / "second", range(NUM_SAMPLES), fill=range(3, num_segments))
    out, _ = made(first, second, partial=True)
    before = lab.small.tree(out)
    assert sorted(lab.numbers_of(out)) == list(range(NUM_SAMPLES))
    _, again = made(first, second, partial=True)
    assert again.num_kept_segments == again.num_segments
    (out / "commits" / "00000000.arrow").unlink()
    (out / "index.arrow").unlink()
    _, again = made(first, second, partial=True)
    assert again.num_kept_segments == again.num_segments - 1
    assert lab.small.tree(out) == before
    with pytest.raises(UserError, match="is not committed; the new store was started with segments") as caught:
        made(second, first, partial=True)
    assert str(second) in caught.value.happened
    assert "give them in that order" in caught.value.advice


def test_samples_that_are_not_ok_are_left_out_by_name(lab: ModuleType, made: Recode, tmp_path: Path) -> None:
    store = lab.make_store(tmp_path / "store", range(12), status={3: 1, 5: 2, 7: 2})
    out, report = made(store)
    assert sorted(lab.numbers_of(out)) == [0, 1, 2, 4, 6, 8, 9, 10, 11]
    assert report.left_out == {"non-finite": 1, "failed": 2}
    assert lab.content(out) == lab.content(store)
    assert StoreReader(out).num_statuses == {"ok": 9, "non-finite": 0, "failed": 0}
    bad = lab.make_store(tmp_path / "bad", [1, 2], status={1: 1, 2: 2})
    with pytest.raises(UserError, match="no sample is left to write: 1 non-finite, 1 failed"):
        made(bad, name="none")


def test_whole_token_files_and_frozen_parts_are_linked(whole: Path, made: Recode) -> None:
    out, _ = made(whole)
    for name in ("plan/tokens-00000.arrow", "frozen/frozen.safetensors", "frozen/config.json"):
        assert (out / name).stat().st_ino == (whole / name).stat().st_ino
    assert not (out / ".tokens").exists()


def test_a_damaged_state_is_named_and_what_was_written_stays(whole: Path, made: Recode, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    segment = sorted((broken / "hidden").glob("c.*"))[2]
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    with pytest.raises(UserError, match=rf"{segment.name}' cannot be trusted: a chunk does not match .*tap 1"):
        made(broken, taps=(17,))
    assert not list((tmp_path / "out").rglob("*.tmp.*"))
    frozen = broken / "frozen" / "frozen.safetensors"
    frozen.write_bytes(frozen.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match="does not match its checksum"):
        made(broken, name="other")


def test_frozen_parts_of_another_target_are_refused(lab: ModuleType, made: Recode, tmp_path: Path) -> None:
    one, two = (lab.make_store(tmp_path / name, numbers) for name, numbers in (("one", [1, 2]), ("two", [3, 4])))
    (two / "frozen" / "config.json").unlink()
    with pytest.raises(UserError, match=r"frozen/config.json' does not exist"):
        made(one, two)
    assert not (tmp_path / "out").exists()


def test_too_little_room_is_refused_with_the_bytes(lab: ModuleType, whole: Path, made: Recode) -> None:
    """A store whose manifest speaks of more positions than any disk holds."""
    plan = plan_recode(RecodeConfig(out=str(whole.parent / "never")), [whole])
    out, _ = made(whole)
    needed = needed_bytes(plan)
    assert folder_bytes(out) <= needed <= folder_bytes(out) + 150_000
    done = plan_recode(RecodeConfig(out=str(out)), [whole])
    assert needed_bytes(done) < needed - sum(map(len, segments_of(out).values())) + 1
    huge = replace(plan, manifest=replace(plan.manifest, hidden_size=2**40))
    with pytest.raises(UserError, match=r"the new store needs .* bytes\) more, .* free[\s\S]*--no-space-check"):
        check_space(huge)


@pytest.mark.parametrize("longest", [1, 700, 8192, 131_072, 5_000_000])
def test_token_files_never_end_before_their_number_of_samples(longest: int) -> None:
    """Against the rule of a token file, batch by batch: a full file holds no more batches than it may."""
    tokens = np.full(60_000, longest)
    tokens[::2] = 1
    taken = Taken(source=tokens, number=tokens, first=tokens, n=tokens, num_tokens=tokens)
    rows = rows_per_file(taken)
    batches = held = held_tokens = 0
    for count in tokens[:rows].tolist():
        held, held_tokens = held + 1, held_tokens + count
        if held == BATCH_SAMPLES or held_tokens >= BATCH_TOKENS:
            batches, held, held_tokens = batches + 1, 0, 0
    assert batches + (held > 0) < MAX_BATCHES
    assert rows >= 1


def test_too_little_room_leaves_nothing_behind(
    whole: Path, made: Recode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255)))
        with pytest.raises(UserError, match=r"the new store needs .* bytes\) more, .* free"):
            made(whole)
        assert not (tmp_path / "out").exists()
    made(whole)


def test_a_source_that_changed_after_the_plan_is_refused_by_its_worker(
    lab: ModuleType, made: Recode, tmp_path: Path
) -> None:
    """What a launcher planned with and what a worker opens may differ: other states in the same places."""
    store = lab.make_store(tmp_path / "store", range(12))
    out, _ = made(store)
    manifest = read_manifest(out)
    [origin] = manifest.data["recoded"]["sources"].values()
    assert SourceReader(store, origin, 0, manifest.tap_layers).taps == [0, 1, 2]
    lab.fill_segments(store, read_manifest(store), [1], version=1)
    found = StoreReader(store).snapshot
    with pytest.raises(UserError, match=f"is another store now: snapshot {found}") as caught:
        SourceReader(store, origin, 0, manifest.tap_layers)
    assert origin["snapshot"] in caught.value.expected


def test_a_source_of_a_partial_recode_may_grow_but_not_change(lab: ModuleType, made: Recode, tmp_path: Path) -> None:
    store = lab.make_store(tmp_path / "store", range(12), fill=[0, 2])
    out, _ = made(store, partial=True)
    manifest = read_manifest(out)
    [origin] = manifest.data["recoded"]["sources"].values()
    lab.fill_segments(store, read_manifest(store), [1])
    SourceReader(store, origin, 0, manifest.tap_layers)
    lab.fill_segments(store, read_manifest(store), [2], version=1)
    with pytest.raises(UserError, match="is another store now: snapshot"):
        SourceReader(store, origin, 0, manifest.tap_layers)


def test_repair_prints_the_command_that_completes_a_recoded_store(
    lab: ModuleType, made: Recode, tmp_path: Path
) -> None:
    store = lab.make_store(tmp_path / "store", range(NUM_SAMPLES), fill=[0, 1, 3])
    settings = {"codec": "int8:4", "taps": (17, 1), "last": False, "split": "train", "limit": 9, "budget": "9MB"}
    out, report = made(store, name="an out", partial=True, segment_positions=512, **settings)
    before = lab.small.tree(out)
    (out / "hidden" / "c.1.0.0").unlink()
    command = repair(out, verify(out)).command
    assert command.startswith("dflash recode STORES --out '")
    words = [str(store) if word == "STORES" else word for word in shlex.split(command)[1:]]
    main(words)
    assert {path: data for path, data in lab.small.tree(out).items() if ".damaged-" not in path} == before
    assert report.num_segments > 1


def test_two_recodes_do_not_share_a_store(whole: Path, made: Recode) -> None:
    out, _ = made(whole)
    with FolderLock(out), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        made(whole)


def test_a_recoded_store_is_recoded_again_and_remembers(lab: ModuleType, whole: Path, made: Recode) -> None:
    first, _ = made(whole, name="first", limit=15)
    second, _ = made(first, name="second", limit=10, taps=(9,))
    manifest: Manifest = read_manifest(second)
    origin = manifest.data["recoded"]["sources"]["1"]
    assert origin["plan_sha256"] == read_manifest(first).plan_sha256
    assert origin["recoded"] == read_manifest(first).data["recoded"]
    assert lab.numbers_of(second) == lab.numbers_of(first)[:10]
