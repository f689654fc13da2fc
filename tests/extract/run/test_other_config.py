"""A config.json that is edited between two runs of one store gives other states from the same tensor files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.launch import extract
from dflash_offline.extract.same_target import require_same_target
from dflash_offline.extract.targets.facts import read_facts
from dflash_offline.store.frozen import CONFIG_PATH, require_same_parts
from dflash_offline.store.index import PLAN_PATH
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import checksum, read_manifest, write_manifest

MakeConfig = Callable[..., ExtractConfig]


def edit_config(target: Path, **changes: Any) -> None:
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_older(store: Path) -> None:
    """As an earlier version wrote it: neither the manifest nor the frozen parts know the config's fingerprint.

    Its commits name another identity then, so there are none.
    """
    manifest = read_manifest(store)
    older = {name: value for name, value in manifest.target.items() if name != "config_sha256"}
    write_manifest(store, replace(manifest, target=older))
    document = json.loads((store / CONFIG_PATH).read_text())
    document = {key: value for key, value in document.items() if key != "sha256"} | {"config": older}
    (store / CONFIG_PATH).write_text(json.dumps(document | {"sha256": checksum(document)}))
    (store / PLAN_PATH).unlink()  # it names the manifest; extract lays it out anew


@pytest.fixture
def target(case_target: Any, tmp_path: Path) -> Path:
    return shutil.copytree(case_target(), tmp_path / "t")


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    return [
        {"input_ids": [6 + (7 * i + j) % 250 for j in range(60)], "loss_mask": [0] * 20 + [1] * 40} for i in range(6)
    ]


def test_another_config_is_refused_with_both_values(
    tmp_path: Path, target: Path, lines: Any, make_data: Any, make_config: MakeConfig, content: Any
) -> None:
    config = make_config(make_data(lines, target), tmp_path / "store")
    extract(config)
    before, was = content(tmp_path / "store"), read_facts(str(target)).config_sha256
    edit_config(target, use_cache=False, transformers_version="9.9")
    assert extract(config).num_kept_segments > 0, "these keys change no state"
    edit_config(target, rms_norm_eps=1e-3)
    now = read_facts(str(target)).config_sha256
    with pytest.raises(UserError, match=f'target.config_sha256 = "{was}" there, "{now}" now') as caught:
        extract(config)
    assert len(str(caught.value).splitlines()) == 3
    assert content(tmp_path / "store") == before
    with pytest.raises(UserError, match=f"config_sha256 = '{now}'\nexpected: '{was}'"):
        require_same_target(read_manifest(tmp_path / "store"), read_facts(str(target)).as_plain())


def test_a_store_without_the_fact_is_finished_as_before(
    tmp_path: Path, target: Path, lines: Any, make_data: Any, make_config: MakeConfig
) -> None:
    store = tmp_path / "store"
    config = make_config(make_data(lines, target), store)
    extract(config)
    for is_frozen in (True, False):
        make_older(store)
        shutil.rmtree(store / "commits")
        (store / "index.arrow").unlink()
        if not is_frozen:
            shutil.rmtree(store / "frozen")
        assert extract(config).num_new_segments == read_manifest(store).num_segments
        assert "config_sha256" not in read_manifest(store).target
        assert "config_sha256" not in json.loads((store / CONFIG_PATH).read_text())["config"]
        assert not verify(store).faults


def test_frozen_parts_of_an_older_store_are_those_of_a_newer_one() -> None:
    """As recode meets them that makes one store of both."""
    before = {"tensors": {}, "config": {"name": "t"}}
    one, other = ({"tensors": {}, "config": {"name": "t", "config_sha256": value}} for value in ("aa", "bb"))
    require_same_parts(Path("config.json"), before, one)
    require_same_parts(Path("config.json"), one, before)
    with pytest.raises(UserError, match='config_sha256 = "aa" there, "bb" now'):
        require_same_parts(Path("config.json"), one, other)
