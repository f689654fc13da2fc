"""What a store says it is, and the refusal to be something else."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from dflash_offline import UserError
from dflash_offline.store.manifest import Manifest, differences, read_manifest, require_same, write_manifest


@pytest.fixture
def manifest(tmp_path: Path, small: ModuleType) -> Manifest:
    return small.make_manifest(small.make_plan(small.make_samples(tmp_path / "data", 3)))


def test_a_manifest_comes_back(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert isinstance(read_manifest(tmp_path).tap_layers, tuple)
    require_same(tmp_path, read_manifest(tmp_path), manifest)


def test_tuples_and_lists_are_the_same_fact(manifest: Manifest) -> None:
    as_tuple = replace(manifest, target={**manifest.target, "eos_ids": (1, 2)})
    as_list = replace(manifest, target={**manifest.target, "eos_ids": [1, 2]})
    assert differences(as_tuple, as_list) == []


CHANGES = {
    "target.revision": lambda m: replace(m, target={**m.target, "revision": "main"}),
    "target.weights_sha256": lambda m: replace(m, target={**m.target, "weights_sha256": "00"}),
    "target.rope.rope_theta": lambda m: replace(m, target={**m.target, "rope": {"rope_theta": 5e5}}),
    "target.added": lambda m: replace(m, target={**m.target, "added": True}),
    "tap_layers": lambda m: replace(m, tap_layers=(1, 9, 18)),
    "data.facts.max_length": lambda m: replace(
        m, data={**m.data, "facts": {**m.data["facts"], "max_length": 1024}}, plan_sha256="other"
    ),
    "codec": lambda m: replace(m, codec="int8"),
    "has_last": lambda m: replace(m, has_last=False),
    "segment_positions": lambda m: replace(m, segment_positions=1024),
    "plan_sha256": lambda m: replace(m, plan_sha256="00"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_by_name_with_both_values(manifest: Manifest, name: str) -> None:
    other = CHANGES[name](manifest)
    found = differences(manifest, other)
    assert found[0][0] == name
    with pytest.raises(UserError) as caught:
        require_same(Path("store"), manifest, other)
    _, was, now = found[0]
    assert f"{name} = {json.dumps(was)} there, {json.dumps(now)} now" in caught.value.happened


def test_reordered_taps_differ(manifest: Manifest) -> None:
    assert differences(manifest, replace(manifest, tap_layers=(9, 1, 17))) == [("tap_layers", [1, 9, 17], [9, 1, 17])]


def test_the_report_of_the_data_is_no_identity(manifest: Manifest) -> None:
    assert differences(manifest, replace(manifest, data={**manifest.data, "report": {"lines_in": 4}})) == []


def test_the_identity_is_that_of_equal_settings_and_of_no_others(manifest: Manifest) -> None:
    again = replace(manifest, data={**manifest.data, "report": {"lines_in": 4}})
    assert again.identity_sha256 == replace(manifest).identity_sha256 == manifest.identity_sha256
    others = [change(manifest).identity_sha256 for change in CHANGES.values()]
    others += [replace(manifest, **{name: value}).identity_sha256 for name, value in (("window", 8), ("dtype", "f"))]
    assert len({manifest.identity_sha256, *others}) == 1 + len(CHANGES) + 2


def test_a_later_fact_is_compared_where_both_have_it(manifest: Manifest) -> None:
    """Stores written before it was there still open, resume and train."""
    before = replace(manifest, target={k: v for k, v in manifest.target.items() if k != "config_sha256"})
    one, other = (replace(before, target={**before.target, "config_sha256": value}) for value in ("aa", "bb"))
    assert differences(before, one) == differences(one, before) == []
    assert differences(one, other) == [("target.config_sha256", "aa", "bb")]


def test_no_store_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no store at"):
        read_manifest(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no store at"):
        read_manifest(tmp_path / "file")


@pytest.mark.parametrize("version", [1, 3, "2", None])
def test_another_format_version_is_refused(tmp_path: Path, manifest: Manifest, version: object) -> None:
    write_manifest(tmp_path, replace(manifest, version=version))
    with pytest.raises(UserError, match="format version"):
        read_manifest(tmp_path)


def test_every_changed_character_of_a_fact_is_noticed(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(tmp_path, manifest)
    path = tmp_path / "zarr.json"
    data = path.read_bytes()
    for place in range(data.index(b'"dflash"'), data.rindex(b'"dflash_sha256"'), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        if not data[place : place + 1].isspace():  # a blank between two facts says nothing
            with pytest.raises(UserError, match=r"zarr\.json"):
                read_manifest(tmp_path)


def test_a_foreign_group_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(UserError, match="no manifest of dflash-offline"):
        read_manifest(tmp_path)
