"""The handed situations: a full disk (c25), changed settings (c26)."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.cli import main
from dflash_offline.extract.config import ExtractConfig, PrepareConfig
from dflash_offline.extract.launch import extract
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

MakeConfig = Callable[..., ExtractConfig]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1,600 KiB; the store of `data` takes more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_case_c25_disk_full(
    small_disk: Path, data: Path, whole_store: Path, make_config: MakeConfig, start_extract: Any, content: Any
) -> None:
    store = small_disk / "store"
    config = make_config(data, store)
    with pytest.raises(UserError, match=r"the store needs .* MB .* more, .* has .* free"):
        extract(config)
    assert not store.exists()

    code, _, err = start_extract(config, shards=2, options=("--no-space-check",)).end(limit_s=240.0)
    assert code == 1
    error = err[err.index("error:") :]
    assert "ENOSPC" in error
    assert len(error.strip().splitlines()) == 3
    reader = StoreReader(store, partial=True)
    assert 0 < len(reader) < len(StoreReader(whole_store))
    told = re.search(r"(\d+) of (\d+) samples in \d+ committed segments are safe", error)
    assert told is not None
    assert int(told[2]) == len(StoreReader(whole_store))
    assert 0 < int(told[1]) <= len(reader)  # the other worker may commit one more after that
    assert not list(store.rglob("*.tmp.*"))

    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    code, out, err = start_extract(config, shards=1).end(limit_s=240.0)
    assert code == 0, err
    assert f"{len(reader.file_bytes)} kept from before" in out
    assert content(store) == content(whole_store)


def test_a_read_only_disk_is_named_in_three_lines(
    small_disk: Path, data: Path, whole_store: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    store = Path(shutil.copytree(whole_store, small_disk / "store"))
    (store / "commits" / "00000001.arrow").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"store/\.lock' failed: .*EROFS") as caught:
        extract(make_config(data, store))
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(SystemExit):
        main(["verify", str(store), "--repair"])
    told = capsys.readouterr()
    assert told.out == ""
    assert "EROFS" in told.err
    assert len(told.err.strip().splitlines()) == 3


@dataclass
class Made:
    """A target folder, its data and their store, all of them one test's own."""

    root: Path
    target: Path
    lines: list[dict[str, Any]]
    config: ExtractConfig

    def prepare(self, name: str = "other", lines: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
        """Another DATA, from a file of the same name."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        source = folder / "chats.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines or self.lines))
        settings = {
            "target": str(self.target),
            "out": str(folder / "data"),
            "max_length": 512,
            "min_trained": 2,
            "duplicates": "keep",
        } | changes
        prepare(PrepareConfig(**settings), [str(source)])
        return folder / "data"

    def again(self, data: Path | None = None, **changes: Any) -> ExtractConfig:
        """The config of another start on the same store."""
        return replace(self.config, **({"data": str(data)} if data else {}), **changes)


@pytest.fixture
def made(tmp_path: Path, case_target: Any, make_config: MakeConfig, extract_here: Callable[..., Survey]) -> Made:
    target = tmp_path / "target"
    shutil.copytree(case_target("plain"), target)
    lines = [{"prompt": f"{word} " * 3, "completion": f"{word} " * (4 + n)} for n, word in enumerate("abcdefgh")]
    config = make_config(tmp_path / "first" / "data", tmp_path / "store", taps=(0, 1, 2, 3))
    made = Made(tmp_path, target, lines, config)
    made.prepare("first")
    extract_here(config)
    return made


def moved_target(made: Made) -> ExtractConfig:
    shutil.copytree(made.target, made.root / "elsewhere")
    return made.again(made.prepare(target=str(made.root / "elsewhere")))


def replaced_weights(made: Made) -> ExtractConfig:
    path = made.target / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 0.25
    save_file(tensors, path, metadata={"format": "pt"})
    return made.again()


def edited_template(made: Made) -> ExtractConfig:
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    tokenizer.chat_template = tokenizer.chat_template + " "
    tokenizer.save_pretrained(made.target)
    return made.again(made.prepare())


def gained_special_token(made: Made) -> ExtractConfig:
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<|tool|>"]}) == 1
    tokenizer.save_pretrained(made.target)
    return made.again(made.prepare())


def changed_line(made: Made) -> ExtractConfig:
    return made.again(made.prepare(lines=[made.lines[0] | {"completion": "another answer"}, *made.lines[1:]]))


def swapped_lines(made: Made) -> ExtractConfig:
    return made.again(made.prepare(lines=[made.lines[1], made.lines[0], *made.lines[2:]]))


MUST_REFUSE: dict[str, tuple[Callable[[Made], ExtractConfig], str]] = {
    "target path": (moved_target, r'target\.name = ".*/target" there, ".*/elsewhere" now'),
    "weights replaced": (replaced_weights, r'target\.weights_sha256 = "\w+" there, "\w+" now'),
    "another tap": (
        lambda made: made.again(taps=(0, 1, 2, 4)),
        r"tap_layers = \[0, 1, 2, 3\] there, \[0, 1, 2, 4\] now",
    ),
    "taps reordered": (
        lambda made: made.again(taps=(3, 2, 1, 0)),
        r"tap_layers = \[0, 1, 2, 3\] there, \[3, 2, 1, 0\] now",
    ),
    "number format": (
        lambda made: made.again(dtype="bfloat16"),
        r'target\.dtype = "float32" there, "bfloat16" now',
    ),
    "stored format": (lambda made: made.again(codec="fp8"), r"codec 'fp8' is unknown[\s\S]*expected: raw, zstd"),
    "codec": (lambda made: made.again(codec="zstd"), r'codec = "raw" there, "zstd" now'),
    "last state too": (lambda made: made.again(last=True), r"has_last = false there, true now"),
    "segment size": (
        lambda made: made.again(segment_positions=1024),
        r"segment_positions = \d+ there, 1024 now",
    ),
    "longest sample": (
        lambda made: made.again(made.prepare(max_length=1024)),
        r"data\.facts\.max_length = 512 there, 1024 now",
    ),
    "template by one blank": (edited_template, r'template_sha256 = "\w+" there, "\w+" now'),
    "template option": (
        lambda made: made.again(made.prepare(template={"enable_thinking": False})),
        r"data\.facts\.template_options.* there, .*false.* now",
    ),
    "special token gained": (gained_special_token, r'tokenizer_sha256 = "\w+" there, "\w+" now'),
    "line changed": (changed_line, r"data\.facts\.sources = .* there, .* now"),
    "lines swapped": (swapped_lines, r"data\.facts\.sources = .* there, .* now"),
    "row limit": (lambda made: made.again(made.prepare(limit=7)), r"data\.facts\.limit = null there, 7 now"),
}


@pytest.mark.parametrize("case", MUST_REFUSE)
def test_case_c26_changed_setting_is_refused(made: Made, content: Any, case: str) -> None:
    before = content(made.root / "store")
    change, message = MUST_REFUSE[case]
    with pytest.raises(UserError, match=message):
        extract(change(made))
    assert content(made.root / "store") == before, "a refusal touches nothing"


@pytest.mark.parametrize("change", [moved_target, edited_template, gained_special_token])
def test_target_that_data_was_not_prepared_for_is_refused(
    made: Made, tmp_path: Path, change: Callable[[Made], ExtractConfig]
) -> None:
    """The first DATA with the changed target, and a new store: still refused, with both values."""
    change(made)
    target = made.root / "elsewhere"
    target = target if target.exists() else made.target
    fresh = made.again(store=str(tmp_path / "fresh"), target=str(target))
    with pytest.raises(UserError, match=r"was prepared for .* now is"):
        extract(fresh)
    assert not (tmp_path / "fresh").exists()


def store_moved(made: Made) -> ExtractConfig:
    shutil.move(made.root / "store", made.root / "moved")
    return made.again(store=str(made.root / "moved"))


def data_touched(made: Made) -> ExtractConfig:
    os.utime(made.root / "first" / "chats.jsonl")
    return made.again(made.prepare())


def target_moved(made: Made) -> ExtractConfig:
    shutil.move(made.target, made.root / "elsewhere")
    return made.again(target=str(made.root / "elsewhere"))


def target_moved_and_prepared_again(made: Made) -> ExtractConfig:
    moved = target_moved(made)
    return replace(moved, data=str(made.prepare(target=moved.target)))


def target_behind_a_link(made: Made) -> ExtractConfig:
    """Another mount point of one folder."""
    target_moved(made)
    made.target.symlink_to("elsewhere")
    return made.again()


FREE: dict[str, Callable[[Made], ExtractConfig]] = {
    "shards": lambda made: made.again(shards=4),
    "token budget": lambda made: made.again(token_budget=17),
    "threads, limits and checks": lambda made: made.again(cpu_threads=2, stall_s=33.0, space_check=False),
    "output moved": store_moved,
    "data file touched": data_touched,
    "target moved": target_moved,
    "target moved, data prepared again": target_moved_and_prepared_again,
    "target behind a link": target_behind_a_link,
}


@pytest.mark.parametrize("case", FREE)
def test_case_c26_free_change_is_accepted(made: Made, case: str) -> None:
    found = survey(FREE[case](made))
    report = extract(found.config)
    assert report.num_kept_segments == report.num_segments == found.plan.num_segments


def test_a_store_is_continued_with_a_target_that_moved(
    made: Made, content: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The worker loads it where it lies now; the store is that of one place, and so are the samples."""
    store, before = made.root / "store", content(made.root / "store")
    data, before_data = made.root / "first" / "data", content(made.root / "first" / "data")
    (store / "commits" / "00000000.arrow").unlink()
    (store / "index.arrow").unlink()
    shutil.rmtree(store / "frozen")
    config = target_moved(made)
    with pytest.raises(UserError, match=r"/target', which is not there\n[\s\S]*give --target"):
        extract(made.again())
    assert extract(config).num_new_segments == 1
    assert content(store) == before
    told = capfd.readouterr().err
    for what in ("was prepared for target", "the store was made with target"):
        assert re.search(f"{what} .*/target; .*/elsewhere has the same", told)
    assert not verify(store).faults
    settings = {"target": str(config.target), "max_length": 512, "min_trained": 2, "duplicates": "keep"}
    again = prepare(PrepareConfig(out=str(data), **settings), [str(data.parent / "chats.jsonl")])
    assert (again.is_new, content(data)) == (False, before_data)
    assert f"{data} was prepared for target {made.target}; all that decides it" in capfd.readouterr().err


def test_a_target_that_moved_and_changed_is_refused(made: Made, content: Any) -> None:
    replaced_weights(made)
    before = content(made.root / "store")
    with pytest.raises(UserError, match=r"target\.name = [\s\S]*target\.weights_sha256 = "):
        extract(target_moved(made))
    assert content(made.root / "store") == before


def test_case_c26_resume_with_other_batches_gives_the_same_rows(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig
) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole_store, store)
    (store / "index.arrow").unlink()
    for segment in (0, 5, 6):
        (store / "commits" / f"{segment:08d}.arrow").unlink()
    extract(make_config(data, store, token_budget=150, shards=2))
    old, new = StoreReader(whole_store), StoreReader(store)
    assert new.samples.sample_id.tolist() == old.samples.sample_id.tolist()
    for i in range(len(old)):
        states = np.empty((2, 3, int(old.samples.n[i]), 64), dtype=np.uint16)
        old.read(i, states[0])
        new.read(i, states[1])
        values = (states.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(values[1], values[0], rtol=2.0**-7, atol=1e-3)
