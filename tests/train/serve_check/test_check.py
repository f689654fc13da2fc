"""`dflash serve-check` as a whole, with our own decoding standing in for vLLM (see stand_in/)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from dflash_offline import UserError
from dflash_offline.cli import dflash
from dflash_offline.settings import resolve
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export
from dflash_offline.train.serve_check.config import ServeCheckConfig
from safetensors.torch import load_file, save_file

OPTIONS = ["--engine", "vllm", "--checkpoint", "48", "--max-new-tokens", "24", "--set", "start_s=300"]


@pytest.fixture
def run_dir(tiny_run: Any, tmp_path: Path) -> Path:
    """A copy of the run, whose result and log are its own."""
    return Path(shutil.copytree(tiny_run.run_dir, tmp_path / "run"))


def checked(run_dir: Path, *options: str) -> Result:
    return CliRunner().invoke(dflash, ["serve-check", str(run_dir), *OPTIONS, *options])


def saved(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "serve-check.json").read_text())


def exported(run_dir: Path, folder: Path, **changes: Any) -> Path:
    """An export of the run, with values of its config changed: dotted names as key, with two underscores."""
    export(run_dir, ExportConfig(out=str(folder), checkpoint="48"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        place = config
        *outer, last = name.split("__")
        for key in outer:
            place = place[key]
        place[last] = value
    path.write_text(json.dumps(config))
    return folder


def test_an_engine_that_does_what_we_do_agrees(run_dir: Path, stand_in: None) -> None:
    done = checked(run_dir)
    assert done.exit_code == 0, done.output
    found = saved(run_dir)
    assert found["agrees"] is True
    assert found["engine"] == found["ours"]
    assert found["num_equal"] == found["num_prompts"] == 6
    assert found["ours"]["num_cycles"] > 20
    assert 0 < found["ours"]["per_position"][0] < 1, "a drafter that is sometimes right, else equal says little"
    assert found["tokens"] == {"num_chats": 2, "num_texts": 6, "others": []}
    assert found["diagnosis"] is None
    assert "verdict    the engine does what training measured" in done.output
    assert "6 of 6 equal" in done.output
    assert f"{found['ours']['acceptance_length']:.3f} ours" in done.output
    assert (run_dir / "serve-check.log").read_text().count("/v1/completions") == 6


@pytest.mark.slow
def test_the_format_of_speculators_is_served_with_one_argument(run_dir: Path, stand_in: None, tmp_path: Path) -> None:
    assert checked(run_dir, "--format", "speculators").exit_code == 0
    assert saved(run_dir)["layout"] == "speculators"
    folder = tmp_path / "given"
    export(run_dir, ExportConfig(out=str(folder), checkpoint="48", format="speculators"))
    content = (folder / "config.json").read_text()
    done = checked(run_dir, "--export", str(folder))
    assert done.exit_code == 0, done.output
    assert (folder / "config.json").read_text() == content


@pytest.mark.slow
def test_prompts_of_a_file_are_compared_as_chats(run_dir: Path, tiny_run: Any, stand_in: None, tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": task.prompt}]} for task in tiny_run.tasks[:3]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = checked(run_dir, "--prompts", str(tmp_path / "prompts.jsonl"))
    assert done.exit_code == 0, done.output
    assert saved(run_dir)["tokens"] == {"num_chats": 3, "num_texts": 3, "others": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, words",
    [
        ("head", "cause      head: none, every draft is token 0"),
        ("tokens", "template: a chat of 1 messages has other tokens in the engine"),
        ("answers", "outputs differ"),
    ],
)
def test_what_the_engine_does_otherwise_is_named(
    fault: str, words: str, run_dir: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", fault)
    done = checked(run_dir)
    assert done.exit_code == 1
    assert words in done.output
    assert saved(run_dir)["agrees"] is False


@pytest.mark.slow
def test_an_engine_that_ends_leaves_no_result(run_dir: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "exit")
    done = checked(run_dir)
    assert isinstance(done.exception, UserError)
    assert "exit code 7: RuntimeError: the stand-in ends here" in str(done.exception)
    assert not (run_dir / "serve-check.json").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dflash_config__target_layer_ids": [1, 3, 4]}, "taps (dflash_config.target_layer_ids) is [1, 3, 4]"),
        ({"dflash_config__mask_token_id": 0}, "mask token (dflash_config.mask_token_id) is 0"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "rope_theta) is absent, not 10000"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings) is True, not False"),
    ],
)
def test_a_folder_that_is_not_the_run_is_named_and_not_served(
    changes: dict[str, Any], words: str, run_dir: Path, tmp_path: Path
) -> None:
    done = checked(run_dir, "--export", str(exported(run_dir, tmp_path / "export", **changes)))
    assert done.exit_code == 1, done.output
    assert words in done.output
    assert "not started" in done.output
    assert saved(run_dir)["agrees"] is False
    assert not (run_dir / "serve-check.log").exists()


def test_a_missing_tensor_is_named(run_dir: Path, tmp_path: Path) -> None:
    folder = exported(run_dir, tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop("layers.1.self_attn.k_norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = checked(run_dir, "--export", str(folder))
    assert done.exit_code == 1
    assert "layers.1.self_attn.k_norm.weight is absent" in done.output
    save_file(tensors | {"layers.1.self_attn.k_norm.weight": torch.zeros_like(lost)}, folder / "model.safetensors")
    assert (
        "layers.1.self_attn.k_norm.weight is other than the run's" in checked(run_dir, "--export", str(folder)).output
    )


@pytest.mark.slow
def test_a_wrong_folder_that_is_served_is_told_by_its_acceptance(run_dir: Path, stand_in: None, tmp_path: Path) -> None:
    changes = {"rope_theta": 1e6, "rope_parameters__rope_theta": 1e6}
    folder = exported(run_dir, tmp_path / "export", **changes)
    done = checked(run_dir, "--export", str(folder), "--set", "compare_folder=false")
    assert done.exit_code == 1
    assert "not compared with the run" in done.output
    assert "cause      rope: theta 1e+06, not 10000" in done.output


def test_an_engine_that_is_not_there_is_an_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = checked(run_dir, "--engine-python", "/bin/false")
    assert isinstance(done.exception, UserError)
    assert "/bin/false" in str(done.exception)
    assert not (run_dir / "serve-check.json").exists()


@pytest.mark.parametrize(
    "setting",
    ["engine=trt", "format=gguf", "tolerance=0", "max_new_tokens=1", "limit=0", "start_s=0", "request_s=0"],
)
def test_settings_that_cannot_be_are_refused(setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(UserError, match=name):
        resolve(ServeCheckConfig, name="serve-check", overrides=[setting])


def test_settings_that_do_nothing_together_are_refused() -> None:
    with pytest.raises(UserError, match="does nothing with --export"):
        ServeCheckConfig(export="folder", format="speculators")
    with pytest.raises(UserError, match="close the quote"):
        ServeCheckConfig(engine_args="--name 'a")
    assert ServeCheckConfig(engine_args="--a 'b c'").extra_arguments == ("--a", "b c")
