"""Bad input at the front door: three clear lines, exit code 1, no traceback, nothing lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_offline.cli import main
from dflash_offline.extract.targets.tasks import distinct_tasks


def run(*args: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "dflash_offline.cli", *args], capture_output=True, text=True, cwd=cwd)


def must(*args: str, cwd: Path) -> None:
    done = run(*args, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats, ./data, ./store and ./run of the tiny target."""
    folder = tmp_path_factory.mktemp("house")
    lines = []
    for number, task in enumerate(distinct_tasks(24, 0, held_out=False)):
        chat = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": task.answer}]
        lines.append(json.dumps({"messages": chat, "split": "heldout" if number < 4 else "train"}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    must("prepare", "chats.jsonl", "--target", "tiny", "--set", "min_trained=2", cwd=folder)
    must("extract", cwd=folder)
    must("train", "--out", "run", "--layers", "1", "--block-size", "8", "--steps", "2", cwd=folder)
    (folder / "empty.jsonl").write_text("")
    (folder / "useless.jsonl").write_text('{"messages": []}\n\n{"note": "no chat"}\n')
    return folder


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time of change; locks do not count."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    "line, told",
    [
        ("prepare missing.jsonl --target tiny --out new", "missing.jsonl"),
        ("prepare empty.jsonl --target tiny --out new", "empty"),
        ("prepare useless.jsonl --target tiny --out new", "no "),
        ("prepare chats.jsonl --target no-such-model --out new", "no-such-model"),
        ("prepare chats.jsonl --target tiny --max-length 64", "max_length"),
        ("prepare chats.jsonl --target tiny --out new --set device=gpu", "device = 'gpu'"),
        ("prepare chats.jsonl --target tiny --out new --set date=2026-01-31", "date = '2026-01-31'"),
        ("prepare chats.jsonl --target tiny --out new --max-new-tokens 9", "max_new_tokens = 9"),
        ("prepare chats.jsonl --target tiny --out new --responses target --turns each", "turns = 'each'"),
        ("prepare chats.jsonl --target tiny --out new --html nowhere/x.html", "nowhere/x.html"),
        ("prepare chats.jsonl --target tiny --out new --html new", "new"),
        ("prepare chats.jsonl --target tiny --out new --html data", "data"),
        ("prepare chats.jsonl --target tiny --out new --html chats.jsonl", "chats.jsonl"),
        ("inspect store --png nowhere/x.png", "nowhere/x.png"),
        ("inspect store --png data", "data"),
        ("extract --data chats.jsonl --store new", "chats.jsonl"),
        ("extract --store new --taps 1,9", "9"),
        ("extract --store new --taps 1,1", "1"),
        ("extract --store new --taps 0,5", "5"),
        ("extract --store new --taps=-1", "-1"),
        ("extract --store new --devices 0-5", "0"),
        ("extract --taps 0,1", "tap_layers"),
        ("train --store data --out new", "data"),
        ("train --out new --mask-token 0", "mask token 0"),
        ("train --out new --mask-token 3", "mask token 3"),
        ("train --out new --mask-token 512", "mask token 512"),
        ("train --out new --mask-token 21", "mask token 21 is an ordinary token"),
        ("train --out new --set drafter.taps=[7]", "7"),
        ("train --out new --devices cuda:3", "cuda:3"),
        ("train --out run --layers 1 --block-size 16 --steps 2", "block_size"),
        ("evaluate run --target chats.jsonl", "chats.jsonl"),
        ("evaluate run --checkpoint 77", "77"),
        ("evaluate run --prompts missing.jsonl", "missing.jsonl"),
        ("evaluate store", "store"),
        ("export run --out data", "data"),
        ("verify run", "run"),
        ("inspect data", "data"),
    ],
)
def test_three_lines_and_nothing_changed(
    house: Path, line: str, told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = tree(house)
    monkeypatch.chdir(house)
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 1
    told_lines = capfd.readouterr().err
    assert "Traceback" not in told_lines
    happened, expected, advice = told_lines.strip().splitlines()[-3:]
    assert happened.startswith("error: ")
    assert told in happened
    assert expected.startswith("expected: ")
    assert advice.startswith("to do: ")
    assert tree(house) == before


@pytest.mark.parametrize("png", ["nowhere/x.png", "data"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_told(
    house: Path, png: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(house)
    with pytest.raises(SystemExit):
        main(["inspect", "store", "--png", png])
    assert capfd.readouterr().out == ""


def test_a_store_of_another_target_is_refused(house: Path, tmp_path: Path) -> None:
    """Same shapes, other weights: nothing but the fingerprint tells them apart."""
    import torch
    from dflash_offline.extract.targets.hf import resolve_name
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(resolve_name("tiny"), dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(resolve_name("tiny")).save_pretrained(tmp_path / "other")
    for line in (
        ["extract", "--target", str(tmp_path / "other")],
        ["evaluate", "run", "--target", str(tmp_path / "other")],
    ):
        before = tree(house)
        done = run(*line, cwd=house)
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stderr
        assert "weights_sha256" in done.stderr or "target" in done.stderr
        assert done.stderr.strip().splitlines()[-3].startswith("error: ")
        assert tree(house) == before
