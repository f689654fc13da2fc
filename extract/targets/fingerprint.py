"""Fingerprints that tell one target, tokenizer or template from another.

Content decides, never a time or a path. Knows files and JSON; no torch, no transformers.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import UserError, system_reason

WHOLE_FILE_BYTES = 64 * 2**20
BLOCK_BYTES = 64 * 2**10
NUM_BLOCKS = 1024


def weights_sha256(files: Sequence[Path]) -> str:
    """Fingerprint of the tensor files, in the given order.

    Hashed for each file: its name, its size, its header (safetensors: length and JSON; else the
    first 64 KiB), then all bytes of a file of at most 64 MiB, else 1,024 evenly spaced blocks
    of 64 KiB, the first and the last block among them. So at most 64 MiB of a file are read. A
    change of a large file that touches none of the blocks keeps the fingerprint; another
    training, quantisation or merge changes nearly every byte. Raises UserError for a file that
    cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        try:
            add_file(digest, path)
        except OSError as error:
            raise UserError(
                f"reading {str(path)!r} failed: {system_reason(error)}",
                "tensor files that you may read, on a disk that gives them back",
                "check rights, mount, the disk and its log, or copy the target again",
            ) from error
    return digest.hexdigest()


def add_file(digest: "hashlib._Hash", path: Path) -> None:
    """Hashes what `weights_sha256` says of one file."""
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        digest.update(read_header(file, path, size))
        if size <= WHOLE_FILE_BYTES:
            file.seek(0)
            while block := file.read(2**20):
                digest.update(block)
            return
        for i in range(NUM_BLOCKS):
            file.seek((size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))


def read_header(file: Any, path: Path, size: int) -> bytes:
    start = file.read(8)
    if path.suffix == ".safetensors" and len(start) == 8:
        length = struct.unpack("<Q", start)[0]
        if length <= size - 8:
            return start + file.read(length)
    return start + file.read(BLOCK_BYTES - 8)


def text_sha256(value: Any) -> str:
    """sha256 of a JSON value in one canonical spelling."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """Fingerprint of what turns text into ids: vocabulary, merges, normalizer, special tokens.

    Padding and truncation, which callers switch on a tokenizer in use, are left out.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is not None:
        state = json.loads(core.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        added = {str(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "added": added}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    flags = {key: getattr(tokenizer, key, None) for key in ("add_bos_token", "add_eos_token")}
    return text_sha256([state, special, flags])
