"""`transformers serve` with the packaged target, asked by `dflash regenerate`, killed and resumed in the middle."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.lines.shapes import Chat
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.targets.facts import read_text_side
from dflash_offline.extract.targets.hf import load_target, resolve_name
from dflash_offline.extract.targets.tasks import distinct_tasks
from dflash_offline.store.samples import SampleTable
from environments import make_environment

pytestmark = pytest.mark.slow
PACKAGES = ["torch==2.13.0", "transformers[serving]==5.24.0"]
MAX_NEW_TOKENS = 64
LIMIT_S = 120.0
# transformers takes the answer out of the text by the marks of a model's family; the packaged target is a Qwen3 with
# marks of its own, which it has to be told.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close": "<|end|>", "content": "text"}},
}


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, f"process {process.args} ended with {process.returncode}"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `transformers` command of an environment of its own."""
    return make_environment(tmp_path_factory.mktemp("serving"), PACKAGES).with_name("transformers")


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(resolve_name("tiny"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"response_template": RESPONSE_TEMPLATE}))
    return folder


def start(serving: Path, model: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server that answers, and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(serving), "serve", str(model), *options], stdout=file, stderr=file, env=variables
        )
    url = f"http://127.0.0.1:{port}/v1"

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{url}/models", timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    try:
        wait_until(answers, process)
    except AssertionError:
        process.kill()
        raise
    return process, url


@pytest.fixture(scope="module")
def url(serving: Path, served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, url = start(serving, served_folder, tmp_path_factory.mktemp("log") / "server.log")
    yield url
    process.terminate()
    process.wait(LIMIT_S)


def chats() -> list[list[dict[str, str]]]:
    """Forty questions that the target knows, and twenty chats of two."""
    asked = [task.prompt for task in distinct_tasks(80, 3, held_out=True)]
    single = [[{"role": "user", "content": prompt}] for prompt in asked[:40]]
    pairs = zip(asked[40:60], asked[60:])
    old = {"role": "assistant", "content": "to be replaced"}
    return single + [[{"role": "user", "content": a}, old, {"role": "user", "content": b}] for a, b in pairs]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats()))
    return path


@pytest.fixture(scope="module")
def out(url: str, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was finished in three starts, of which two were killed in the middle."""
    out = tmp_path_factory.mktemp("out") / "responses"
    journal = out / "journal.log"
    options = ["--out", str(out), "--target", "tiny", "--max-new-tokens", str(MAX_NEW_TOKENS), "--endpoint", url]
    command = [sys.executable, "-m", "dflash_offline.cli", "regenerate", str(questions), *options]

    def num_done() -> int:
        return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0

    for least in (12, 35):
        process = subprocess.Popen([*command, "--concurrency", "4"])
        wait_until(lambda least=least: num_done() >= least, process)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(LIMIT_S) == -signal.SIGKILL
        assert num_done() < len(chats())
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    num_answers = sum(message["role"] == "assistant" for row in rows(out) for message in row["messages"])
    assert f"{num_answers} of {num_answers} prompts are as long as the target's template makes them" in done.stdout
    return out


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]


def test_every_line_is_there_once_and_in_order(out: Path, questions: Path) -> None:
    assert [row["source_line"] for row in rows(out)] == list(range(1, len(chats()) + 1))
    for row, chat in zip(rows(out), chats()):
        asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
        wanted = [message["content"] for message in chat if message["role"] == "user"]
        assert asked == (wanted if row["ended"] is None else wanted[:1])
        assert row["ended"] in (None, "cut at the limit")
    assert (out / "left-out.jsonl").read_text() == ""


def test_the_answers_are_what_the_target_says_here(out: Path) -> None:
    """Every turn, on the history that the file holds, one prompt at a time."""
    target, side = load_target("tiny", device="cpu", dtype="float32"), read_text_side("tiny")
    renderer = ChatRenderer(side, {})
    num_whole = num_cut = 0
    for row in rows(out):
        for place, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                (ids,) = target.generate([renderer.question(Chat(row["messages"][:place], None))], MAX_NEW_TOKENS)
                text = side.tokenizer.decode(ids, skip_special_tokens=True)
                is_cut = len(ids) == MAX_NEW_TOKENS  # as this server says it, also where the last token is the end mark
                assert message["content"] == text.strip()  # it strips what it gives
                assert is_cut == (message.get("finish_reason") == "length")
                num_cut += is_cut
                num_whole += not is_cut
    assert num_whole > 50
    assert num_cut > 0, "the limit must matter here"


def test_prepared_samples_are_those_of_responses_written_here(out: Path, questions: Path, tmp_path: Path) -> None:
    """From the served answers' text, the ids and masks that `--responses target` keeps as they came out.

    Not those of the few answers that the server strips or that the limit cuts.
    """
    alone = tmp_path / "alone.jsonl"
    alone.write_text("".join(questions.read_text().splitlines(keepends=True)[:40]))
    served = tmp_path / "served.jsonl"
    served.write_text("".join((out / "responses.jsonl").read_text().splitlines(keepends=True)[:40]))
    options: dict[str, Any] = {"target": "tiny", "min_trained": 1, "processes": 1}
    answered: dict[str, Any] = {"responses": "target", "device": "cpu", "max_new_tokens": MAX_NEW_TOKENS}
    prepare(PrepareConfig(out=str(tmp_path / "a"), **answered, **options), [str(alone)])
    prepare(PrepareConfig(out=str(tmp_path / "b"), **options), [str(served)])
    answers, tokenizer, num_equal = rows(out), read_text_side("tiny").tokenizer, 0
    ours, theirs = SampleTable(tmp_path / "a"), SampleTable(tmp_path / "b")
    assert len(ours) == len(theirs) == 40
    for row in range(40):
        (ids, mask), (served_ids, served_mask) = ours.tokens(row), theirs.tokens(row)
        answer, text = answers[row]["messages"][-1], tokenizer.decode(ids[mask], skip_special_tokens=True)
        if "finish_reason" not in answer and answer["content"] == text:
            assert ids.tolist() == served_ids.tolist(), row
            assert mask.tolist() == served_mask.tolist(), row
            num_equal += 1
    assert num_equal >= 30


def test_a_server_that_gives_raw_text_is_refused(serving: Path, questions: Path, tmp_path: Path) -> None:
    """Without its marks the packaged target's answers come with prompt and marks: nothing to train on."""
    process, url = start(serving, resolve_name("tiny"), tmp_path / "server.log")
    try:
        options = ["--out", str(tmp_path / "raw"), "--target", "tiny", "--endpoint", url]
        command = [sys.executable, "-m", "dflash_offline.cli", "regenerate", str(questions), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
    assert done.returncode == 1
    assert "error: control mark in the answer" in done.stderr
