"""What is packaged: the list of packages, the wheel's content, the scripts, the extras."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OUTSIDE = {"tests", "docs", "typings", "build", "data", "runs", "demo", "export"}


def packages_in_tree() -> set[str]:
    found = {"dflash_offline"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.relative_to(ROOT).parts[:-1]
        if parts and not parts[0].startswith(".") and parts[0] not in OUTSIDE:
            found.add(".".join(["dflash_offline", *parts]))
    return found


def test_the_list_of_packages_is_the_tree() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_in_tree()


def test_the_extras_name_every_optional_package() -> None:
    extras = {name: " ".join(needs) for name, needs in PROJECT["project"]["optional-dependencies"].items()}
    assert "triton" in extras["gpu"]
    assert "flash-linear-attention" in extras["gpu"]
    assert "causal-conv1d" in extras["conv1d"]
    assert "causal-conv1d" not in extras["gpu"]
    assert "gguf" in extras["gguf"]
    assert not any("torchvision" in needs or "torchaudio" in needs for needs in extras.values())


def test_torch_is_loose_here_and_pinned_in_the_constraints() -> None:
    assert "torch>=2.10" in PROJECT["project"]["dependencies"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pinned


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "project"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file() and not name.startswith(("tests/", "typings/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)], check=True, cwd=out
    )
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_the_code_and_the_tiny_target(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in packages_in_tree():
        assert package.replace(".", "/") + "/__init__.py" in names
    assert "dflash_offline/cli.py" in names
    for tiny in ("tiny-qwen3", "tiny-qwen3.5"):
        for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md"):
            assert f"dflash_offline/extract/targets/{tiny}/{name}" in names
    assert "dflash_offline/train/evaluate/prompts-standard.jsonl" in names
    assert {f"dflash_offline/train/report/page.{kind}" for kind in ("css", "js")} <= names
    assert not any(name.startswith(("dflash_offline/tests", "dflash_offline/docs", "tests/")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_module_of_the_tree_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in packages_in_tree():
        folder = ROOT.joinpath(*package.split(".")[1:])
        for module in folder.glob("*.py"):
            assert f"{package.replace('.', '/')}/{module.name}" in names


@pytest.mark.parametrize("script", ["dflash", "dflash-offline"])
def test_the_scripts_answer(script: str) -> None:
    path = Path(sys.executable).with_name(script)
    answer = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"}
    )
    assert answer.stdout.startswith("dflash-offline, version ")
