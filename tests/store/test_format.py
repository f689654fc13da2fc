"""docs/store-format.md is true: a reader written from that page alone, without our code, reads a store."""

import hashlib
import json
import re
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest


def crc(data: bytes) -> int:
    return google_crc32c.value(data)


def canonical_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checked_arrow(path: Path) -> tuple[pa.Table, dict[bytes, bytes]]:
    """Sections 3 and 4: the file's checksum, then its table and metadata."""
    data = path.read_bytes()
    found = list(re.finditer(rb"crc32c:([0-9a-f]{8})(?: except:([0-9+ ]{6144}))?", data))
    assert len(found) == 2
    assert found[0][0] == found[1][0]
    covered = bytearray(data)
    for match in found:
        covered[match.start(1) : match.end(1)] = b"00000000"
    for text in reversed((found[0][2] or b"").split()):
        offset, size = (int(number) for number in text.split(b"+"))
        del covered[offset : offset + size]
    # Ranges lie before the second group of digits, which was zeroed first, so deleting them is safe.
    assert crc(bytes(covered)) == int(found[0][1], 16)
    reader = pa.ipc.open_file(pa.py_buffer(data))
    return reader.read_all(), reader.schema.metadata


def plan_sha256(plan: pa.Table, segment_positions: int) -> str:
    digest = hashlib.sha256(f"plan {segment_positions} {plan.num_rows}\n".encode())
    for field in plan.schema:
        values = plan.column(field.name).to_pylist()
        if pa.types.is_dictionary(field.type):
            texts = list(dict.fromkeys(values))
            digest.update(np.array([texts.index(value) for value in values], "<i4").tobytes())
            digest.update(json.dumps(texts).encode())
        else:
            digest.update(np.array(values, "<i8" if field.type == pa.int64() else "<i4").tobytes())
    return digest.hexdigest()


def read_states(path: Path, row: dict, manifest: dict, taps: int, expected_bytes: int, expected_crc: int) -> np.ndarray:
    """Section 5: the states [taps, n, H] of one sample as bits."""
    data, hidden = path.read_bytes(), manifest["hidden_size"]
    assert len(data) == expected_bytes
    num_chunks = manifest["segment_positions"] // 64
    index = data[-(num_chunks * taps * 16 + 4) :]
    assert crc(index[:-4]) == struct.unpack("<I", index[-4:])[0]
    planes, checksums = [[] for _ in range(taps)], b""
    for chunk in range(row["position"] // 64, -(-(row["position"] + row["n"]) // 64)):
        for tap in range(taps):
            offset, size = struct.unpack_from("<QQ", index, (chunk * taps + tap) * 16)
            assert size == 64 * hidden * 2 + 4
            body, checksum = data[offset : offset + size - 4], data[offset + size - 4 : offset + size]
            assert crc(body) == struct.unpack("<I", checksum)[0]
            checksums += checksum
            planes[tap].append(np.frombuffer(body, "<u2").reshape(64, hidden))
    assert crc(checksums) == expected_crc
    return np.stack([np.concatenate(plane)[: row["n"]] for plane in planes])


@pytest.mark.parametrize("is_consolidated", [True, False])
def test_a_stranger_reads_a_store_from_the_page_alone(tmp_path: Path, small: ModuleType, is_consolidated: bool) -> None:
    store_dir, manifest_given, _ = small.make_store(tmp_path, 20, status={103: 1, 108: 2})
    attributes = json.loads((store_dir / "zarr.json").read_text())["attributes"]
    manifest = attributes["dflash"]
    assert manifest["version"] == 2
    assert canonical_sha256(manifest) == attributes["dflash_sha256"]
    own_data = {name: value for name, value in manifest["data"].items() if name != "report"}
    identity = canonical_sha256(manifest | {"data": own_data})
    plan, metadata = checked_arrow(store_dir / "plan/index.arrow")
    assert plan_sha256(plan, manifest["segment_positions"]) == manifest["plan_sha256"]
    assert metadata[b"plan_sha256"].decode() == manifest["plan_sha256"]
    if is_consolidated:
        from dflash_offline.store.index import write_consolidated

        write_consolidated(store_dir, manifest_given.identity_sha256, manifest_given.num_segments)
        commits, metadata = checked_arrow(store_dir / "index.arrow")
        assert metadata[b"identity_sha256"].decode() == identity
        weights = {segment: sizes for segment, *sizes in json.loads(metadata[b"segments"])}
    else:
        tables, weights = [], {}
        for path in sorted((store_dir / "commits").iterdir()):
            table, metadata = checked_arrow(path)
            assert int(metadata[b"segment"]) == int(path.stem)
            assert metadata[b"identity_sha256"].decode() == identity
            weights[int(path.stem)] = json.loads(metadata[b"file_bytes"])
            tables.append(table)
        commits = pa.concat_tables(tables)
    assert len(weights) == manifest["num_segments"]
    num_read = 0
    for row, commit in zip(plan.to_pylist(), commits.to_pylist(), strict=True):
        assert [row[name] for name in ("sample_id", "segment", "position", "n")] == [
            commit[name] for name in ("sample_id", "segment", "position", "n")
        ]
        if commit["status"]:
            continue
        name, sizes = f"c.{row['segment']}.0.0", weights[row["segment"]]
        states = read_states(store_dir / "hidden" / name, row, manifest, 3, sizes[0], commit["crc32c"])
        assert np.array_equal(states, small.states(row["sample_id"], row["n"]))
        last = read_states(store_dir / "last" / name, row, manifest, 1, sizes[1], commit["last_crc32c"])
        assert np.array_equal(last, small.states(row["sample_id"] + 10**6, row["n"], 1))
        tokens, _ = checked_arrow(store_dir / f"plan/tokens-{row['tokens_file']:05d}.arrow")
        sample = tokens.slice(row["tokens_row"], 1).to_pylist()[0]
        ids, mask = np.array(sample["token_ids"], "<u4"), np.array(sample["loss_mask"], "u1")
        assert crc(ids.tobytes() + mask.tobytes()) == sample["crc32c"]
        assert hashlib.sha256(ids.tobytes() + mask.tobytes()).digest()[:8] == struct.pack("<Q", sample["content"])
        assert len(ids) == sample["num_tokens"] > row["n"] == sample["num_recorded"]
        num_read += 1
    assert num_read == 18
