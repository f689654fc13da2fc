"""What a reader gives back, and that it never gives back anything else in silence."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.index import columns, commit_path, read_plan, write_consolidated
from dflash_offline.store.manifest import Manifest, checksum
from dflash_offline.store.reader import StoreReader, open_tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> tuple[Path, Manifest]:
    """A complete store of 20 samples; tests that damage it take a copy."""
    store_dir, manifest, _ = small.make_store(tmp_path_factory.mktemp("store"))
    return store_dir, manifest


@pytest.fixture
def copy(store: tuple[Path, Manifest], tmp_path: Path) -> Path:
    return Path(shutil.copytree(store[0], tmp_path / "copy"))


def read_all(reader: StoreReader) -> dict[int, np.ndarray]:
    found = {}
    for i in range(len(reader)):
        out = np.empty((len(reader.manifest.tap_layers), reader.samples.n[i], reader.manifest.hidden_size), np.uint16)
        reader.read(i, out)
        found[int(reader.samples.sample_id[i])] = out
    return found


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def test_every_sample_comes_back(store: tuple[Path, Manifest], small: ModuleType) -> None:
    with StoreReader(store[0]) as reader:
        assert len(reader) == 20
        assert reader.num_statuses == {"ok": 20, "non-finite": 0, "failed": 0}
        table = small.SampleTable(store[0].parent / "data")
        for i, (sample_id, n) in enumerate(zip(reader.samples.sample_id.tolist(), reader.samples.n.tolist())):
            out, last = np.empty((3, n, small.HIDDEN), np.uint16), np.empty((n, small.HIDDEN), np.uint16)
            reader.read(i, out)
            reader.read_last(i, last)
            assert np.array_equal(out, small.states(sample_id, n))
            assert np.array_equal(last, small.states(sample_id + 10**6, n, 1)[0])
            ids, mask = reader.tokens(i)
            assert np.array_equal(ids, table.tokens(sample_id - 100)[0])
            assert mask.all()
        assert reader.samples.split.tolist() == table.column("split").tolist()
        assert reader.samples.task.tolist() == table.column("task").tolist()
        assert reader.rows("heldout").tolist() == [4, 9, 14, 19]
        assert reader.rows("nothing").tolist() == []


def test_slices_and_taps(store: tuple[Path, Manifest], small: ModuleType) -> None:
    with StoreReader(store[0]) as reader:
        i = int(np.argmax(reader.samples.n))
        sample_id, n = int(reader.samples.sample_id[i]), int(reader.samples.n[i])
        whole = small.states(sample_id, n)
        for start, stop in ((0, n), (1, n), (0, 1), (63, 65), (64, 128), (n - 1, n), (70, 71)):
            for taps in (None, [2, 0], [1]):
                out = np.empty((3 if taps is None else len(taps), stop - start, small.HIDDEN), np.uint16)
                reader.read(i, out, taps=taps, start=start, stop=stop)
                assert np.array_equal(out, whole[slice(None) if taps is None else taps, start:stop])
        last = np.empty((2, small.HIDDEN), np.uint16)
        reader.read_last(i, last, start=63, stop=65)
        assert np.array_equal(last, small.states(sample_id + 10**6, n, 1)[0, 63:65])


def test_padding_cannot_be_asked_for(store: tuple[Path, Manifest], small: ModuleType) -> None:
    with StoreReader(store[0]) as reader:
        for i in range(len(reader)):
            n = int(reader.samples.n[i])
            for start, stop in ((0, n + 1), (n, n + 1), (-1, n), (3, 3)):
                out = np.empty((3, max(0, stop - start), small.HIDDEN), np.uint16)
                with pytest.raises(ValueError, match=f"which has {n}"):
                    reader.read(i, out, start=start, stop=stop)


def test_many_segments_with_few_open_files(
    store: tuple[Path, Manifest], small: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_offline.store.reader.MAX_OPEN_SEGMENTS", 2)
    with StoreReader(store[0]) as reader:
        for i in np.random.default_rng(0).integers(0, len(reader), size=60):
            n = int(reader.samples.n[i])
            out = np.empty((3, n, small.HIDDEN), np.uint16)
            reader.read(int(i), out)
            assert np.array_equal(out, small.states(int(reader.samples.sample_id[i]), n))
            assert len(reader.segments) <= 2


def test_samples_that_went_wrong_are_counted_and_not_read(tmp_path: Path, small: ModuleType) -> None:
    store_dir, _, _ = small.make_store(tmp_path, 12, status={101: 1, 105: 2})
    with StoreReader(store_dir) as reader:
        assert reader.num_statuses == {"ok": 10, "non-finite": 1, "failed": 1}
        assert reader.samples.sample_id.tolist() == [i for i in range(100, 112) if i not in (101, 105)]
        for sample_id, states in read_all(reader).items():
            assert np.array_equal(states, small.states(sample_id, states.shape[1]))


def test_an_incomplete_store_is_refused_unless_asked_for(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 20, fill=False)
    writer = small.StoreWriter(store_dir, manifest)
    for segment in (0, 2):
        small.fill_segment(writer, segment)
    with pytest.raises(UserError, match=f"2 of {manifest.num_segments} segments"):
        StoreReader(store_dir)
    with StoreReader(store_dir, partial=True) as reader:
        expected = [row["sample_id"] for row in plan.to_pylist() if row["segment"] in (0, 2)]
        assert reader.samples.sample_id.tolist() == expected
        small.fill_segment(writer, 1)
        assert sorted(read_all(reader)) == expected  # a snapshot of its start


def test_a_store_without_last_states_says_so(tmp_path: Path, small: ModuleType) -> None:
    store_dir, _, _ = small.make_store(tmp_path, 3, has_last=False)
    with StoreReader(store_dir) as reader, pytest.raises(UserError, match="no last hidden states"):
        reader.read_last(0, np.empty((64, small.HIDDEN), np.uint16))


def test_the_consolidated_index_is_enough(copy: Path, store: tuple[Path, Manifest], small: ModuleType) -> None:
    with StoreReader(copy) as reader:
        expected = read_all(reader)
    manifest = store[1]
    assert write_consolidated(copy, manifest.identity_sha256, manifest.num_segments)
    shutil.rmtree(copy / "commits")
    with StoreReader(copy) as reader:
        found = read_all(reader)
    assert all(np.array_equal(found[sample_id], states) for sample_id, states in expected.items())
    flip(copy / "index.arrow", 900)
    with pytest.raises(UserError, match=r"index\.arrow.*checksum"):
        StoreReader(copy)


def test_a_flipped_bit_in_the_states_names_file_segment_sample_and_tap(copy: Path) -> None:
    flip(copy / "hidden/c.2.0.0", 64 * 8 * 2 + 4 + 50)  # second chunk of the file: tap 9
    with StoreReader(copy) as reader:
        i = int(np.flatnonzero(reader.samples.segment == 2)[-1])  # the sinks were filled in reverse
        sample_id, n = int(reader.samples.sample_id[i]), int(reader.samples.n[i])
        with pytest.raises(UserError) as caught:
            reader.read(i, np.empty((3, n, 8), np.uint16))
        for word in ("hidden/c.2.0.0", "segment 2", f"sample {sample_id}", "tap 9", "position 0", "checksum"):
            assert word in caught.value.happened
        assert f"dflash verify {copy} --repair" in caught.value.advice
        reader.read(i, np.empty((2, n, 8), np.uint16), taps=[0, 2])  # the other taps are sound


def test_a_flipped_bit_in_a_segment_index_is_named(copy: Path) -> None:
    path = copy / "last/c.0.0.0"
    flip(path, path.stat().st_size - 30)
    with StoreReader(copy) as reader, pytest.raises(UserError, match=r"last/c\.0\.0\.0.*index.*segment 0, sample 100"):
        reader.read_last(0, np.empty((reader.samples.n[0], 8), np.uint16))


def test_a_truncated_or_missing_segment_is_named(copy: Path) -> None:
    path = copy / "hidden/c.0.0.0"
    data = path.read_bytes()
    with StoreReader(copy) as reader:
        out = np.empty((3, reader.samples.n[0], 8), np.uint16)
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(UserError, match=r"c\.0\.0\.0.*commit says.*segment 0, sample 100"):
            reader.read(0, out)
        path.unlink()
        with pytest.raises(UserError, match=r"c\.0\.0\.0.*missing.*segment 0, sample 100"):
            reader.read(0, out)


def test_a_segment_that_the_system_cannot_read_is_named(copy: Path) -> None:
    path = copy / "hidden/c.0.0.0"
    path.unlink()
    path.symlink_to(path)
    with (
        StoreReader(copy) as reader,
        pytest.raises(UserError, match=r"c\.0\.0\.0.*symbolic links.*sample 100") as caught,
    ):
        reader.read(0, np.empty((3, reader.samples.n[0], 8), np.uint16))
    assert "check the disk" in caught.value.advice


def test_a_sound_segment_that_is_not_the_committed_one_is_noticed(
    copy: Path, store: tuple[Path, Manifest], small: ModuleType
) -> None:
    """The same places and lengths, every checksum right, but other states."""
    commit = commit_path(copy, 0).read_bytes()
    writer = small.StoreWriter(copy, store[1])
    sink = writer.open(0)
    for row in range(len(sink.plan["sample_id"])):
        sample_id, position, n = (int(sink.plan[name][row]) for name in ("sample_id", "position", "n"))
        sink.append(sample_id, position, small.states(sample_id + 1, n), small.states(5, n, 1)[0])
    sink.commit({})
    commit_path(copy, 0).write_bytes(commit)
    with StoreReader(copy) as reader, pytest.raises(UserError, match="not those of the commit"):
        reader.read(0, np.empty((3, reader.samples.n[0], 8), np.uint16))


def test_a_flipped_bit_in_commit_plan_or_tokens_is_named(copy: Path) -> None:
    for name in ("commits/00000001.arrow", "plan/index.arrow"):
        data = (copy / name).read_bytes()
        flip(copy / name, len(data) // 2)
        with pytest.raises(UserError, match=name):
            StoreReader(copy)
        (copy / name).write_bytes(data)
    with StoreReader(copy) as reader:
        needle = reader.tokens(9)[0].tobytes()
    path = copy / "plan/tokens-00001.arrow"
    flip(path, path.read_bytes().index(needle) + 2)
    with StoreReader(copy) as reader, pytest.raises(UserError, match=r"tokens-00001\.arrow.*row 2 "):
        reader.tokens(9)


def test_damage_of_a_token_file_is_named_by_the_samples_in_it(copy: Path) -> None:
    """Token files are opened when first needed, so opening the store does not notice."""
    path = copy / "plan/tokens-00001.arrow"
    with StoreReader(copy) as reader, pytest.raises(UserError, match=r"tokens-00001\.arrow.*holds 7 samples, row 7"):
        reader.table.tokens_at(1, 7)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    with StoreReader(copy) as reader:
        reader.tokens(6)
        for _ in range(2):
            with pytest.raises(UserError, match=r"tokens-00001\.arrow.*no whole token file"):
                reader.tokens(7)
        reader.tokens(14)
    with pytest.raises(UserError, match=r"tokens-00001\.arrow"):
        open_tokens(copy, columns(read_plan(copy)))


def test_columns_without_an_object_per_sample(store: tuple[Path, Manifest]) -> None:
    with StoreReader(store[0]) as reader:
        samples = reader.samples
        assert not vars(samples).keys() & {"split", "task", "source", "origin"}
        for name, column in (
            ("split", samples.split),
            ("task", samples.task),
            ("source", samples.source),
            ("origin", samples.origin),
        ):
            assert column.dtype == object
            for text in {*column.tolist(), "nothing"}:
                assert samples.numbers(name, text).tolist() == [i for i, own in enumerate(column) if own == text]
        assert samples.split is samples.split


def test_a_snapshot_is_what_is_committed(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path / "a", 20, fill=False, status={104: 1})
    writer = small.StoreWriter(store_dir, manifest)
    seen = []
    for segment in (2, 0, 1, *range(3, manifest.num_segments)):
        small.fill_segment(writer, segment, {104: 1})
        with StoreReader(store_dir, partial=True) as reader:
            seen.append(reader.snapshot)
    assert len(set(seen)) == len(seen)
    with StoreReader(store_dir) as reader:
        assert reader.snapshot == seen[-1]
        assert [reader.snapshot_of(segments) for segments in ([2], [2, 0], range(3))] == seen[:3]
        assert reader.snapshot_of(range(manifest.num_segments)) == reader.snapshot
        with pytest.raises(UserError, match=f"segment {manifest.num_segments} .*not committed"):
            reader.snapshot_of([0, manifest.num_segments])
    small.fill_segment(writer, 1, {104: 1})  # the same states again, whoever wrote them
    assert write_consolidated(store_dir, manifest.identity_sha256, manifest.num_segments)
    with StoreReader(store_dir) as reader:
        assert reader.snapshot == seen[-1]
        assert reader.snapshot_of([2, 0]) == seen[1]
    small.fill_segment(writer, 0, {100: 2})
    with StoreReader(store_dir) as reader:
        assert reader.snapshot != seen[-1]
        assert reader.snapshot_of([1, 2]) != seen[1]
        assert reader.snapshot_of([2]) == seen[0]


def test_readers_beside_a_running_writer(
    tmp_path: Path, small: ModuleType, program: list[str], python_environment: dict[str, str]
) -> None:
    """Each reader sees whole segments only, and goes on seeing those that were there when it opened.

    Every other segment is left to a second writer, so that none, some and all are seen however fast they are.
    """
    store_dir, manifest, plan = small.make_store(tmp_path, 60, fill=False)
    planned = plan.to_pylist()
    seen: list[tuple[set[int], str]] = []

    def look() -> None:
        with StoreReader(store_dir, partial=True, threads=2) as reader:
            done = set(reader.samples.segment.tolist())
            assert done == set(reader.file_bytes)
            assert len(reader) == sum(row["segment"] in done for row in planned)
            for sample_id, states in list(read_all(reader).items())[-4:]:
                assert np.array_equal(states, small.states(sample_id, states.shape[1]))
            for old, snapshot in seen[-1:]:
                assert reader.snapshot_of(old) == snapshot
            seen.append((done, reader.snapshot))

    look()
    for rank in ("0", "1"):
        command = [*program, str(store_dir), str(tmp_path / "data"), rank, "2"]
        with subprocess.Popen(command, env=python_environment, stdout=subprocess.DEVNULL) as writer:
            is_running = True
            while is_running:
                is_running = writer.poll() is None
                look()
        assert writer.returncode == 0
    sizes = {len(done) for done, _ in seen}
    assert (min(sizes), max(sizes)) == (0, manifest.num_segments)
    assert len(sizes) > 2


def test_a_commit_of_other_samples_is_named(copy: Path, tmp_path: Path, small: ModuleType) -> None:
    """A sound commit of the right plan and segment whose rows are not those of the plan."""
    from dflash_offline.store.arrow_file import read_table, write_table
    from dflash_offline.store.index import COMMIT_SCHEMA

    table, metadata = read_table(commit_path(copy, 1), COMMIT_SCHEMA)
    metadata.pop("checksum")
    write_table(commit_path(copy, 1), table.slice(1), metadata)
    with pytest.raises(UserError, match=r"00000001\.arrow.*not those of the plan"):
        StoreReader(copy)
    doubled = table.set_column(
        3, COMMIT_SCHEMA.field("n"), table["n"].combine_chunks().take(list(range(len(table)))[::-1])
    )
    write_table(commit_path(copy, 1), doubled, metadata)
    with pytest.raises(UserError, match=r"00000001\.arrow.*not those of the plan"):
        StoreReader(copy)


def test_missing_tokens_are_named(copy: Path) -> None:
    (copy / "plan/tokens-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"tokens-00002\.arrow"):
        StoreReader(copy)


def test_a_newer_format_is_refused(copy: Path) -> None:
    path = copy / "zarr.json"
    group = json.loads(path.read_text())
    group["attributes"]["dflash"]["version"] = 3
    group["attributes"]["dflash_sha256"] = checksum(group["attributes"]["dflash"])
    path.write_text(json.dumps(group))
    with pytest.raises(UserError, match="format version 3"):
        StoreReader(copy)


def test_an_unknown_codec_is_refused(tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    manifest = replace(small.make_manifest(plan), codec="later")
    with pytest.raises(UserError, match="codec 'later'"):
        small.create_store(tmp_path / "store", manifest, plan, tmp_path / "data")


def test_no_store_and_half_a_store(tmp_path: Path, small: ModuleType) -> None:
    with pytest.raises(UserError, match="no store at"):
        StoreReader(tmp_path)
    store_dir, _, _ = small.make_store(tmp_path, 3)
    (store_dir / "plan/index.arrow").unlink()
    with pytest.raises(UserError, match=r"plan/index\.arrow.*does not exist"):
        StoreReader(store_dir)


def test_a_store_of_no_samples(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 0)
    assert manifest.num_segments == 0
    with StoreReader(store_dir) as reader:
        assert len(reader) == 0
        assert reader.rows("train").tolist() == []


def test_the_reader_needs_no_torch(store: tuple[Path, Manifest], python_environment: dict[str, str]) -> None:
    code = (
        "import sys; from pathlib import Path; from dflash_offline.store.reader import StoreReader; "
        "StoreReader(Path(sys.argv[1])); heavy = {'torch', 'transformers', 'zarr', 'pandas'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(store[0])], env=python_environment, check=True)
