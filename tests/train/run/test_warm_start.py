"""Runs that start from a drafter in a served format: its very weights, its shape, and what does not fit refused."""

import dataclasses
import json
import shutil
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.cli import COMMANDS
from dflash_offline.options import resolved
from dflash_offline.settings import resolve
from dflash_offline.train.checkpoint import list_steps, load
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export, write_zlab
from dflash_offline.train.export.folders import read_drafter_folder
from dflash_offline.train.export.tensors import file_sha256
from dflash_offline.train.facts import read_facts
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.loop import Trainer
from dflash_offline.train.restore import start_from
from dflash_offline.train.run import Run, check_run, write_run
from dflash_offline.train.spec import DrafterSpec
from dflash_offline.train.start import run_trainer
from dflash_offline.train.summary import describe_run
from dflash_offline.train.warm_start import WarmStart
from dflash_offline.watch import Channel

# Nothing here is a default of the config or of the target.
START = DrafterSpec(
    hidden_size=32,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=10,
    num_taps=2,
    vocab_size=64,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    block_size=6,
    mask_token_id=61,
    tap_layers=(3, 0),
    num_target_layers=6,
    max_positions=256,
    attention=(AttentionKind(9, True), AttentionKind(9, True), AttentionKind()),
)


def write_start(folder: Path, spec: DrafterSpec = START, dtype: torch.dtype = torch.float32, seed: int = 3) -> Path:
    drafter = Drafter(spec)
    drafter.init_weights(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.01 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    write_zlab(folder, spec, drafter.to(dtype).state_dict(), {"pad_id": 0, "eos_ids": (1,)}, "card")
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "drafter")


def make_config(store: Path, out: Path, start: Path | None, *settings: str) -> TrainConfig:
    """Small rows; of the drafter only what is given."""
    own = [f"store={store}", f"out={out}", "rows.row_tokens=128", "steps=0", "devices=cpu"]
    own += [f"drafter.init={start}"] if start is not None else []
    return resolve(TrainConfig, name="train", overrides=[*own, *settings])


def check(config: TrainConfig) -> Run:
    return check_run(config, lambda: "cpu")


def train_inside(config: TrainConfig) -> Path:
    """The trainer in this process (its loader in one of its own); what it tells is dropped."""
    _ours, theirs = Pipe()
    run_trainer(Channel(theirs, "trainer"), config)
    return Path(config.out)


def test_what_is_not_given_comes_from_the_folder(tiny_store, tmp_path, start) -> None:
    assert check(make_config(tiny_store, tmp_path / "run", start)).facts.spec == START
    given = ("num_layers=3", "num_heads=6", "num_kv_heads=3", "head_dim=10", "intermediate_size=40", "taps=[3,0]")
    given += ("mask_token_id=61", "block_size=6", "window=9", "layer_types=2xsliding,full", "causal=sliding")
    settings = [f"drafter.{setting}" for setting in given]
    assert check(make_config(tiny_store, tmp_path / "run", start, *settings)).facts.spec == START


@pytest.mark.parametrize("folder_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run_dtype", ["float32", "bfloat16"])
def test_step_0_has_the_very_weights_of_the_folder(tiny_store, tmp_path, folder_dtype, run_dtype) -> None:
    folder = write_start(tmp_path / "start", dtype=folder_dtype)
    config = make_config(tiny_store, tmp_path / "run", folder, f"dtype={run_dtype}")
    _, wanted = read_drafter_folder(folder)
    trainer = Trainer(check(config), torch.device("cpu"), Channel(Pipe()[1], "trainer"))
    assert trainer.facts.init is not None
    start_from(WarmStart(**trainer.facts.init), trainer.optimizer)
    for name, parameter in trainer.drafter.named_parameters():
        assert torch.equal(parameter, wanted[name].to(getattr(torch, run_dtype))), name
    masters = load(train_inside(config), 0).weights
    assert set(masters) == set(wanted)
    for name, tensor in wanted.items():
        assert masters[name].dtype == torch.float32
        assert torch.equal(masters[name], tensor.float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_warm_start_and_export_again_are_equal(lab, tiny_store, tmp_path, dtype) -> None:
    settings = ("steps=2", "drafter.window=20", "drafter.layer_types=sliding,full", "drafter.causal=sliding")
    first = train_inside(lab.make_config(tiny_store, tmp_path / "first", *settings))
    export(first, ExportConfig(out=str(tmp_path / "a"), checkpoint="2"), dtype=dtype)
    second = train_inside(make_config(tiny_store, tmp_path / "second", tmp_path / "a"))
    export(second, ExportConfig(out=str(tmp_path / "b"), checkpoint="0"), dtype=dtype)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    sha256 = file_sha256(tmp_path / "a" / "model.safetensors")
    assert sha256 in (tmp_path / "b" / "README.md").read_text()
    assert "started from" not in (tmp_path / "a" / "README.md").read_text()


REFUSED: list[tuple[str, str]] = [
    ("num_layers=2", "drafter.num_layers = 2, and the drafter of drafter.init has 3"),
    ("layer_types=sliding,full", "drafter.num_layers = 2, and the drafter of drafter.init has 3"),
    ("intermediate_size=48", "drafter.intermediate_size = 48, and the drafter of drafter.init has 40"),
    ("num_heads=4", "drafter.num_heads = 4, and the drafter of drafter.init has 6"),
    ("num_kv_heads=6", "drafter.num_kv_heads = 6, and the drafter of drafter.init has 3"),
    ("head_dim=8", "drafter.head_dim = 8, and the drafter of drafter.init has 10"),
    ("mask_token_id=60", "drafter.mask_token_id = 60, and the drafter of drafter.init has 61"),
    ("taps=[0,3]", "drafter.taps = [0, 3], and the drafter of drafter.init has [3, 0]"),
]


@pytest.mark.parametrize("setting, told", REFUSED, ids=[setting for setting, _ in REFUSED])
def test_a_setting_that_the_weights_contradict_is_refused(tiny_store, tmp_path, start, setting, told) -> None:
    with pytest.raises(UserError) as caught:
        check(make_config(tiny_store, tmp_path / "run", start, f"drafter.{setting}"))
    assert caught.value.happened == told
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "settings, attention",
    [
        (["window=12"], (AttentionKind(12, True), AttentionKind(12, True), AttentionKind())),
        (["causal=no"], (AttentionKind(9), AttentionKind(9), AttentionKind())),
        (["layer_types=3xfull"], (AttentionKind(),) * 3),
        (["layer_types=full,2xsliding"], (AttentionKind(), AttentionKind(9, True), AttentionKind(9, True))),
        (["layer_types=3xfull", "causal=all"], (AttentionKind(None, True),) * 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_block_size_and_layers_may_be_changed_on_purpose(tiny_store, tmp_path, start, settings, attention) -> None:
    changes = [f"drafter.{setting}" for setting in settings]
    config = make_config(tiny_store, tmp_path / "run", start, "drafter.block_size=8", *changes)
    assert check(config).facts.spec == dataclasses.replace(START, block_size=8, attention=attention)


def test_a_window_for_a_drafter_without_one_slides_every_layer(tiny_store, tmp_path) -> None:
    full = write_start(tmp_path / "start", dataclasses.replace(START, attention=(AttentionKind(),) * 3))
    facts = check(make_config(tiny_store, tmp_path / "run", full, "drafter.window=12")).facts
    assert facts.spec.attention == (AttentionKind(12),) * 3


@pytest.mark.parametrize("is_told", [True, False], ids=["ours", "released"])
def test_a_speculators_folder_starts_the_same_run(tiny_store, tmp_path, is_told) -> None:
    """One that the speculators library wrote does not say how many layers the target has; the store does."""
    spec = dataclasses.replace(START, attention=(AttentionKind(),) * 3)
    start = write_start(tmp_path / "start", spec)
    told = {"name": "target", "architecture": "Qwen3ForCausalLM", "num_layers": 6, "hidden_size": 32, "vocab_size": 64}
    wanted = ExportConfig(out=str(tmp_path / "speculators"), format="speculators", target="target")
    export(start, wanted, read_target=lambda _: told)
    path = tmp_path / "speculators" / "config.json"
    config = json.loads(path.read_text())
    if not is_told:
        del config["transformer_layer_config"]["num_target_layers"]
        path.write_text(json.dumps(config))
    run = make_config(tiny_store, tmp_path / "run", tmp_path / "speculators")
    assert check(run).facts.spec == spec
    masters = load(train_inside(run), 0).weights
    _, wanted_weights = read_drafter_folder(start)
    assert all(torch.equal(masters[name], tensor) for name, tensor in wanted_weights.items())


def test_a_drafter_that_samples_from_the_anchor_starts_no_run(tiny_store, tmp_path) -> None:
    folder = write_start(tmp_path / "start")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["shift_label"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="samples from the anchor"):
        check(make_config(tiny_store, tmp_path / "run", folder))
    assert not (tmp_path / "run").exists()


def test_the_option_is_the_field() -> None:
    command = COMMANDS["train"][0]()
    context = command.make_context("train", ["--warm-start", "released"])
    given = {p.name: context.params[p.name] for p in command.params if p.name}
    assert resolved(TrainConfig, "train", given).drafter.init == "released"


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 48}, "hidden_size 48, not 32"),
    ({"vocab_size": 80}, "vocab_size 80, not 64"),
    ({"num_target_layers": 8}, "number of target layers 8, not 6"),
    ({"tap_layers": (3, 1)}, "taps [3, 1], and the store holds [0, 2, 3]"),
    ({"embedding_scale": 5.5}, "embedding_scale 5.5, not 1.0"),
    ({"logit_softcap": 30.0}, "logit_softcap 30.0, not None"),
]


@pytest.mark.parametrize("changes, told", OTHERS, ids=[told for _, told in OTHERS])
def test_a_drafter_of_another_target_is_refused(tiny_store, tmp_path, changes, told) -> None:
    folder = write_start(tmp_path / "start", dataclasses.replace(START, **changes))
    with pytest.raises(UserError) as caught:
        check(make_config(tiny_store, tmp_path / "run", folder))
    assert f"made for another target or other taps: {told}" in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("token, told", [(9, "mask token 9 is not free"), (57, "mask token 57 is an ordinary token")])
def test_its_mask_token_must_be_free_here(tiny_store, tmp_path, token, told) -> None:
    folder = write_start(tmp_path / "start", dataclasses.replace(START, mask_token_id=token))
    with pytest.raises(UserError, match=told):
        check(make_config(tiny_store, tmp_path / "run", folder))


def test_a_folder_that_is_no_drafter_is_refused(tiny_store, tmp_path, start) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        check(make_config(tiny_store, tmp_path / "run", tmp_path / "absent"))
    torn = shutil.copytree(start, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(UserError, match="cannot be read"):
        check(make_config(tiny_store, tmp_path / "run", torn))


def test_the_run_knows_where_it_started_and_a_resume_reads_no_folder(tiny_store, tmp_path, monkeypatch) -> None:
    write_start(tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    settings = ("steps=6", "checkpoint_every=2", "eval_every=6", "keep=9")
    config = make_config(tiny_store, tmp_path / "whole", Path("start"), *settings)
    whole = train_inside(config)
    sha256 = file_sha256(tmp_path / "start" / "model.safetensors")
    assert read_facts(whole).init == {"folder": "start", "path": str(tmp_path / "start"), "sha256": sha256}
    assert f"from {tmp_path / 'start'}" in describe_run(whole)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    (resumed / "report.json").unlink()
    for step in (4, 6):
        shutil.rmtree(resumed / f"checkpoints/step-{step:08d}")
    (tmp_path / "start").rename(tmp_path / "gone")
    train_inside(dataclasses.replace(config, out=str(resumed)))
    assert list_steps(resumed) == list_steps(whole)
    one, other = (load(folder, 6).weights for folder in (resumed, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
    monkeypatch.chdir("/")
    repeated = resolve(TrainConfig, name="train", file=resumed / "train.toml")
    assert not check(repeated).is_new
    assert repeated.drafter.layer_types == ("sliding_attention", "sliding_attention", "full_attention")


def test_another_start_is_another_run(tiny_store, tmp_path, start) -> None:
    config = make_config(tiny_store, tmp_path / "run", start)
    (tmp_path / "run").mkdir()
    write_run(check(config))
    other = write_start(tmp_path / "other", seed=4)
    with pytest.raises(UserError, match=f"drafter.init was '{start}' and is now '{other}'"):
        check(make_config(tiny_store, tmp_path / "run", other))
    with pytest.raises(UserError, match=f"drafter.init was '{start}' and is now None"):
        check(make_config(tiny_store, tmp_path / "run", None))
    with pytest.raises(UserError, match=r"drafter\.block_size was 6 and is now 8"):
        check(make_config(tiny_store, tmp_path / "run", start, "drafter.block_size=8"))


@pytest.mark.parametrize("change", ["other weights", "gone"])
def test_a_run_without_a_checkpoint_wants_the_weights_it_was_started_on(tiny_store, tmp_path, change) -> None:
    folder = write_start(tmp_path / "start")
    config = make_config(tiny_store, tmp_path / "run", folder)
    (tmp_path / "run").mkdir()
    write_run(check(config))
    shutil.rmtree(folder)
    if change == "other weights":
        write_start(folder, seed=4)
    told = "the run was started on" if change == "other weights" else "cannot be read"
    with pytest.raises(UserError, match=told) as caught:
        train_inside(config)
    assert len(str(caught.value).splitlines()) == 3


def test_a_run_of_the_time_before_kinds_is_refused(tiny_store, tmp_path, reference_run) -> None:
    facts = json.loads((reference_run / "run.json").read_text())
    old = {**facts["spec"], "window": None, "is_causal": False}
    del old["attention"]
    for number, told in ((1, "has format 1"), (2, "wrong fields: attention, is_causal, window")):
        (tmp_path / "run.json").write_text(json.dumps(facts | {"format": number, "spec": old}))
        with pytest.raises(UserError, match=told):
            read_facts(tmp_path)
