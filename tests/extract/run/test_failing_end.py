"""A run that ends by a failure, on a disk that fails at the cleaning up too: the first cause is what is told."""

import shutil
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.launch import Dealer, extract
from dflash_offline.extract.survey import survey
from dflash_offline.extract.writing import WriterProcess
from dflash_offline.watch import Channel

MakeConfig = Callable[..., ExtractConfig]


@pytest.fixture
def store(tmp_path: Path, whole_store: Path) -> Path:
    return Path(shutil.copytree(whole_store, tmp_path / "store"))


def test_frozen_parts_that_a_killed_worker_left_are_removed(data: Path, store: Path, make_config: MakeConfig) -> None:
    """Alone in the store nobody else writes them; `--only` leaves those of other machines alone."""
    left = store / "frozen" / "frozen.safetensors.tmp.another-host.17"
    left.touch()
    assert extract(make_config(data, store, shards=1, only="0")).num_missing == 0
    assert left.exists()
    assert extract(make_config(data, store)).num_missing == 0
    assert not left.exists()


def test_a_device_that_cannot_let_go_of_memory_hides_no_error(store: Path) -> None:
    ours, theirs = Pipe()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def use(error: Exception | None) -> WriterProcess:
        with WriterProcess(Channel(theirs, "here"), store, slot_bytes=4096, device="cpu", stall_s=60.0) as writer:
            writer.lock.callback(fail)
            if error is not None:
                raise error
            return writer

    with pytest.raises(UserError, match="the first cause"):
        use(UserError("the first cause", "none", "nothing"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        use(None)
    ours.close()


@pytest.mark.slow
def test_a_store_that_is_gone_in_a_run_is_what_is_told(
    data: Path, store: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    dealer = Dealer(survey(make_config(data, store)), set())
    shutil.rmtree(store / "commits")
    (store / "hidden" / "c.0.0.0.tmp.elsewhere.17").mkdir()  # no file, so that removing it fails
    with pytest.raises(UserError, match=r"commits/\d+.arrow' failed: .*\(ENOENT\)"):
        dealer.run()
    assert "stopped: what is committed cannot be told now" in capsys.readouterr().err
