"""Several launchers on one store, each with its own shards, as the nodes of a shared file system have them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.survey import survey
from dflash_offline.store.index import committed_segments, write_consolidated
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader
from processes import wait_until

MakeConfig = Callable[..., ExtractConfig]
HOLD = (
    "import sys\nfrom pathlib import Path\nfrom dflash_offline.store.files import FolderLock\n"
    "from dflash_offline.store.segment_locks import SegmentLocks\n"
    "store = Path(sys.argv[1])\n"
    "with FolderLock(store, is_shared=True), SegmentLocks(store, [range(int(sys.argv[2]), int(sys.argv[3]))]):\n"
    "    print('held', flush=True)\n    sys.stdin.read()\n"
)


@pytest.fixture
def hold() -> Any:
    """hold(store, segments): another process that has these segments, until the test ends."""
    holders: list[subprocess.Popen[str]] = []

    def start(store: Path, segments: range) -> None:
        command = [sys.executable, "-c", HOLD, str(store), str(segments.start), str(segments.stop)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        holders.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes))
        assert holders[-1].stdout is not None
        assert holders[-1].stdout.readline() == "held\n"

    yield start
    for holder in holders:
        holder.communicate(timeout=120.0)


def num_commits(store: Path) -> int:
    return len(committed_segments(store)) if (store / "commits").is_dir() else 0


@pytest.mark.parametrize(
    "shards, shares", [(2, ("0", "1")), pytest.param(6, ("0-2", "3-5"), marks=pytest.mark.slow)], ids=["2", "6"]
)
def test_two_launchers_fill_one_store(
    tmp_path: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    start_extract: Any,
    content: Any,
    shards: int,
    shares: tuple[str, str],
) -> None:
    """Started together on a store that is not there yet; one is killed and started again."""
    store = tmp_path / "store"
    config = make_config(data, store)
    runs = [start_extract(config, shards=shards, options=("--only", share)) for share in shares]
    assert wait_until(lambda: num_commits(store) >= 3, 120.0)
    os.kill(runs[0].process.pid, signal.SIGKILL)
    runs[0].end()
    code, out, err = runs[1].end(limit_s=240.0)
    assert code == 0, err
    found = survey(make_config(data, store, shards=shards, only=shares[1]))
    assert committed_segments(store) >= {segment for own in found.own_segments for segment in own}
    if num_commits(store) < found.num_asked:
        assert not (store / "index.arrow").exists()
        assert "for the launchers of other shards" in out
        assert "--partial" in out
    code, out, err = start_extract(config, shards=shards, options=("--only", shares[0])).end(limit_s=240.0)
    assert code == 0, err
    assert "kept: " in err
    assert not verify(store).faults
    assert StoreReader(store).manifest.num_segments == num_commits(store)
    assert content(store) == content(whole_store)


def test_a_share_is_recorded_and_nothing_else_is_touched(
    tmp_path: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    extract_here: Any,
    start_extract: Any,
    content: Any,
    hold: Any,
) -> None:
    """Shard 0 is held by another process: this one records shard 1, and leaves the other's temporaries."""
    store = tmp_path / "store"
    first = survey(make_config(data, store, shards=2, only="0")).own_segments[0]
    second = survey(make_config(data, store, shards=2, only="1")).own_segments[0]
    num_segments = second.stop
    assert (first.start, first.stop) == (0, second.start)
    one = extract_here(make_config(data, store, shards=2, only="0"))
    assert committed_segments(store) == set(first)
    assert not (store / "index.arrow").exists()
    for segment in (first[-1], second[0]):
        (store / "hidden" / f"c.{segment}.0.0.tmp.elsewhere.99").write_bytes(b"half")
    hold(store, first)
    code, out, err = start_extract(one.config, shards=2, options=("--only", "1")).end(limit_s=240.0)
    assert code == 0, err
    assert f"shards 1 of 2: segments {second.start}-{second.stop - 1}" in err
    assert f"{len(first)} kept from before, {len(second)} recorded now" in out
    assert [path.name for path in (store / "hidden").glob("*.tmp.*")] == [f"c.{first[-1]}.0.0.tmp.elsewhere.99"]
    (store / "hidden" / f"c.{first[-1]}.0.0.tmp.elsewhere.99").unlink()
    assert len(StoreReader(store).file_bytes) == num_segments
    assert content(store) == content(whole_store)


def test_a_share_that_is_held_is_refused(
    tmp_path: Path, data: Path, make_config: MakeConfig, extract_here: Any, start_extract: Any, hold: Any
) -> None:
    store = tmp_path / "store"
    own = survey(make_config(data, store, shards=2, only="1")).own_segments[0]
    one = extract_here(make_config(data, store, shards=2, only="0"))
    hold(store, own)
    for shards, only in ((2, "1"), (3, "2")):
        code, _, err = start_extract(one.config, shards=shards, options=("--only", only)).end(limit_s=240.0)
        assert code == 1
        assert "are in part held by another launcher" in err
        assert len(err.split("error: ")[1].strip().splitlines()) == 3
    code, _, err = start_extract(one.config, shards=2).end(limit_s=240.0)
    assert code == 1
    assert "is in use by process" in err


def test_the_index_waits_for_every_segment(whole_store: Path, tmp_path: Path) -> None:
    """A hole before the end is seen, however many commits there are."""
    manifest = StoreReader(whole_store).manifest
    store = tmp_path / "store"
    (store / "commits").mkdir(parents=True)
    for path in (whole_store / "commits").iterdir():
        if path.name != "00000002.arrow":
            (store / "commits" / path.name).write_bytes(path.read_bytes())
    assert not write_consolidated(store, manifest.identity_sha256, 4)
    assert write_consolidated(store, manifest.identity_sha256, 2)


def test_more_shards_than_groups_leave_some_without_work(data: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    shares = [survey(make_config(data, tmp_path / "s", shards=48, only=str(shard))) for shard in range(48)]
    assert any(not share.groups for share in shares)
    assert sum(len(segments) for share in shares for segments in share.own_segments) == shares[0].plan.num_segments
    assert all(len(share.workers) == 1 for share in shares)


@pytest.mark.parametrize(
    "settings, message", [({"only": "0"}, "--shards beside it"), ({"only": "2", "shards": 2}, "names shard 2")]
)
def test_only_needs_shards_that_hold_it(
    data: Path, tmp_path: Path, make_config: MakeConfig, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_config(data, tmp_path / "store", **settings)
