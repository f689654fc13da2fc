"""What extract writes, against the target run by hand, one sample at a time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.foretell import plan_command
from dflash_offline.extract.launch import Dealer, extract, report
from dflash_offline.extract.same_target import require_same_target
from dflash_offline.extract.sent_batch import status_of
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.store.index import STATUS_FAILED, STATUS_NON_FINITE, STATUS_OK
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.samples import SampleTable, SampleWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

MakeConfig = Callable[..., ExtractConfig]
BF16_STEP = 2.0**-8  # one unit in the last place, relative


def as_floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()


def largest_error(store: Path, target: Path) -> float:
    """Largest relative error of a stored value against transformers' own hidden states, alone and unpadded.

    Relative to the value, or to a hundredth of the state's largest where the value is smaller.
    """
    reader = StoreReader(store)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    worst = 0.0
    for i in range(len(reader)):
        ids, mask = reader.tokens(i)
        n = int(reader.samples.n[i])
        assert n == max(a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]) + 1
        stored = np.empty((len(reader.manifest.tap_layers), n, reader.manifest.hidden_size), dtype=np.uint16)
        reader.read(i, stored)
        caught: dict[int, torch.Tensor] = {}
        handle = model.model.layers[-1].register_forward_hook(lambda _m, _a, out: caught.update({0: out}))  # noqa: B023
        with torch.no_grad():
            hidden = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        handle.remove()
        expected = torch.stack([hidden[layer + 1][0, :n] for layer in reader.manifest.tap_layers])  # [Lt, n, H]
        got = as_floats(stored)
        if reader.manifest.has_last:
            last = np.empty((n, reader.manifest.hidden_size), dtype=np.uint16)
            reader.read_last(i, last)
            final = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
            expected = torch.cat([expected, final.reshape(1, -1, last.shape[1])[:, :n]])
            got = torch.cat([got, as_floats(last)[None]])
        scale = torch.maximum(expected.abs(), 0.01 * expected.abs().amax(-1, keepdim=True))
        worst = max(worst, float(((got - expected).abs() / scale).max()))
    return worst


def test_states_are_those_of_each_sample_alone(whole_store: Path, case_target: Any) -> None:
    assert largest_error(whole_store, case_target()) < BF16_STEP
    assert not verify(whole_store).faults


def test_hybrid_target_with_last_state(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> None:
    """Gated DeltaNet: no padding may reach a state (case c19)."""
    lines = [
        {"input_ids": [6 + (7 * n + j) % 200 for j in range(n)], "loss_mask": [0] * 3 + [1] * (n - 3)}
        for n in (9, 17, 40, 64, 65, 70)
    ]
    target = case_target("plain", "t19-hybrid")
    config = make_config(make_data(lines, target), tmp_path / "store", taps=(0, 2), last=True, token_budget=4096)
    extract_here(config)
    assert largest_error(tmp_path / "store", target) < BF16_STEP


def test_bytes_do_not_depend_on_shards(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, content: Callable[[Path], dict[str, str]]
) -> None:
    assert len(extract(make_config(data, tmp_path / "three", shards=3)).workers) == 3
    assert content(tmp_path / "three") == content(whole_store)


def test_same_command_again_keeps_everything(
    data: Path, whole_store: Path, make_config: MakeConfig, content: Any
) -> None:
    before = content(whole_store)
    again = extract(make_config(data, whole_store, shards=2))
    assert again.num_kept_segments == again.num_segments
    assert "0 recorded now" in again.text()
    assert content(whole_store) == before


def test_resume_redoes_only_what_is_missing(
    tmp_path: Path,
    data: Path,
    whole_store: Path,
    make_config: MakeConfig,
    content: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Groups torn in the middle, a commit without its index, a stale temporary, no frozen parts."""
    store = tmp_path / "torn"
    shutil.copytree(whole_store, store)
    num_segments = survey(make_config(data, store)).plan.num_segments
    lost = {1, 2, num_segments - 1}
    for segment in lost:
        (store / "commits" / f"{segment:08d}.arrow").unlink()
    (store / "hidden" / "c.2.0.0").unlink()
    (store / "hidden" / "c.1.0.0.tmp.elsewhere.99").write_bytes(b"half")
    (store / "hidden" / "c.0.0.0.tmp.elsewhere.99").write_bytes(b"half")
    (store / "index.arrow").unlink()
    shutil.rmtree(store / "frozen")
    kept_time = (store / "hidden" / "c.0.0.0").stat().st_mtime_ns
    done = extract(make_config(data, store))
    assert (done.num_kept_segments, done.num_new_segments) == (num_segments - 3, 3)
    assert f"kept: {num_segments - 3} of {num_segments} segments" in capsys.readouterr().err
    assert (store / "hidden" / "c.0.0.0").stat().st_mtime_ns == kept_time
    assert content(store) == content(whole_store)


def test_incomplete_data_is_refused(tmp_path: Path, data: Path, make_config: MakeConfig) -> None:
    half = tmp_path / "half"
    shutil.copytree(data, half)
    (half / "data.json").unlink()
    with pytest.raises(UserError, match=r"holds no data\.json"):
        extract(make_config(half, tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_samples_that_are_not_those_of_data_json_are_refused(
    tmp_path: Path, data: Path, make_config: MakeConfig
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(data, changed)
    facts = json.loads((changed / "data.json").read_text())
    (changed / "data.json").write_text(json.dumps(facts | {"fingerprint": "0" * 64}))
    with pytest.raises(UserError, match="have fingerprint"):
        extract(make_config(changed, tmp_path / "store"))


@pytest.mark.parametrize("taps, message", [((0, 0), "more than once"), ((5,), "last layer"), ((0, 9), "tap 9")])
def test_bad_taps_are_refused_before_anything_is_written(
    tmp_path: Path, data: Path, make_config: MakeConfig, taps: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        extract(make_config(data, tmp_path / "store", taps=taps))
    assert not (tmp_path / "store").exists()


def test_two_launchers_do_not_share_a_store(tmp_path: Path, data: Path, whole_store: Path, make_config: Any) -> None:
    from dflash_offline.store.files import FolderLock

    with FolderLock(whole_store), pytest.raises(UserError, match="in use by process"):
        extract(make_config(data, whole_store))


def test_bad_samples_are_marked_and_counted_and_the_others_stand(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> None:
    """Token 7 has an embedding of NaN, token 8 one of zeros: states after them are NaN or zero."""
    target = tmp_path / "target"
    shutil.copytree(case_target(), target)
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    tensors["model.embed_tokens.weight"][8] = 0.0
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    healthy = [[9, 10 + k, 11, 12, 13, 14] for k in range(6)]
    lines = [
        {"input_ids": ids, "loss_mask": [1] * 6} for ids in [*healthy, [9, 7, 10, 11, 12, 13], [8, 9, 10, 11, 12, 13]]
    ]
    config = make_config(make_data(lines, target), tmp_path / "store")
    extract_here(config, with_frozen=False)
    reader = StoreReader(tmp_path / "store")
    assert sorted(reader.samples.source_line.tolist()) == [1, 2, 3, 4, 5, 6]
    assert largest_error(tmp_path / "store", target) < BF16_STEP
    counts = report(Dealer(survey(config), set()), 1.0)
    assert (counts.num_samples, counts.num_ok, counts.num_non_finite, counts.num_failed) == (8, 6, 1, 1)
    assert "8: 6 ok, 1 non-finite, 1 failed" in counts.text()


def older_data(data: Path, ids: list[int]) -> Path:
    """DATA of one sample with these ids, as a version before wrote it without a look at them."""
    with SampleWriter(data, metadata=SampleTable(data).metadata) as writer:
        writer.add(ids, [1] * len(ids), split="train", task="", source="chats.jsonl", source_line=1)
    content = json.loads((data / "data.json").read_text())
    content["fingerprint"] = SampleTable(data).fingerprint()
    (data / "data.json").write_text(json.dumps(content))
    return data


def test_id_outside_the_embedding_is_refused_before_the_run(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> None:
    data = make_data([{"input_ids": [9, 10, 11, 12], "loss_mask": [1] * 4}], case_target())
    config = make_config(older_data(data, [9, 320, 11, 12]), tmp_path / "store")
    for command in (plan_command, extract):
        with pytest.raises(
            UserError, match=r"sample 0 of .* holds token id 320\nexpected: ids below the 320 rows"
        ) as caught:
            command(config)
        assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "store").exists()
    older_data(data, [9, 10, 11, 320])  # behind the last anchor: the target is not run on it
    assert extract_here(config).plan.num_samples == 1


def test_target_that_changes_under_a_running_worker_is_refused() -> None:
    manifest = Manifest(
        target={"name": "t", "weights_sha256": "aa"},
        data={},
        tap_layers=(0,),
        hidden_size=64,
        segment_positions=64,
        num_segments=1,
        num_samples=1,
        num_positions=1,
        plan_sha256="",
    )
    require_same_target(manifest, {"name": "t", "weights_sha256": "aa"})
    with pytest.raises(UserError, match=r"weights_sha256 = 'bb'\nexpected: 'aa'"):
        require_same_target(manifest, {"name": "t", "weights_sha256": "bb"})


def test_status_of_a_sample() -> None:
    peak = np.ones((2, 5), dtype=np.float32)
    assert status_of(peak) == STATUS_OK
    peak[1, 4] = 0.0
    assert status_of(peak) == STATUS_FAILED
    peak[0, 0] = np.nan
    assert status_of(peak) == STATUS_NON_FINITE
    peak[0, 0] = np.inf
    assert status_of(peak) == STATUS_NON_FINITE


def test_a_hybrid_target_in_batches_and_its_slow_path_is_announced_once_c19(
    case_target: Any, make_data: Callable[..., Path], make_config: MakeConfig, tmp_path: Path, capfd: Any
) -> None:
    folder = case_target("plain", "t19-hybrid")
    draw = np.random.default_rng(0)
    lines = [
        {"input_ids": draw.integers(6, 262, n).tolist(), "loss_mask": [0] * 9 + [1] * (n - 9)}
        for n in (150, 70, 20, 21, 99, 33)
    ]
    config = make_config(
        make_data(lines, folder), tmp_path / "store", shards=2, taps=(0, 2), last=True, segment_positions=256
    )
    assert len(extract(config).workers) == 2
    assert largest_error(tmp_path / "store", folder) <= BF16_STEP
    err = capfd.readouterr().err
    assert err.count("in plain torch") == 1
    assert "falling back" not in err
