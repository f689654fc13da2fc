"""An engine's server: started with a limit, its words in errors, and nothing of it left however it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.train.serve_check.server import Server
from dflash_offline.watch import Stalled
from processes import is_alive, wait_until

LIMIT_S = 120.0

# A server that writes its own process id and that of a child in a session of its own, as engines have workers.
SERVER = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[2], "w").write(f"{os.getpid()} {worker.pid}")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"fine")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body == "die":
            print("RuntimeError: all is lost", flush=True)
            os._exit(3)
        self.send_response(400 if body == "wrong" else 200)
        self.end_headers()
        self.wfile.write(b"no JSON" if body == "text" else json.dumps({"said": body}).encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# Runs a server as serve-check does, in a process that a test kills.
PARENT = """
import sys, time
from pathlib import Path
from dflash_offline.train.serve_check.server import Server

port, log, *command = sys.argv[1:]
with Server(command, {}, int(port), Path(log), 60.0) as server:
    server.wait_until_healthy("/", 120.0)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A free port that the system gives to nobody else meanwhile, and that a server may still listen at."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def server_of(folder: Path, port: int, code: str = SERVER) -> Server:
    command = [sys.executable, "-c", code, str(port), str(folder / "pids")]
    return Server(command, {}, port, folder / "log", LIMIT_S)


def pids_in(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "pids").read_text().split()]


def test_a_server_answers_and_leaves_nothing_behind(tmp_path: Path, port: int) -> None:
    with server_of(tmp_path, port) as server:
        assert server.wait_until_healthy("/health", LIMIT_S) < LIMIT_S
        assert server.get_text("/") == "fine"
        assert server.post("/", {"a": 1}) == {"said": {"a": 1}}
        pids = pids_in(tmp_path)
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


def test_an_error_leaves_nothing_behind(tmp_path: Path, port: int) -> None:
    with pytest.raises(ZeroDivisionError), server_of(tmp_path, port) as server:
        server.wait_until_healthy("/", LIMIT_S)
        raise ZeroDivisionError
    assert not any(map(is_alive, pids_in(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_killed_parent_leaves_nothing_behind(number: signal.Signals, tmp_path: Path, port: int) -> None:
    kept = [sys.executable, "-c", SERVER, str(port), str(tmp_path / "pids")]
    command = [sys.executable, "-c", PARENT, str(port), str(tmp_path / "log"), *kept]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        pids = pids_in(tmp_path)
        assert all(map(is_alive, pids))
        parent.send_signal(number)
        parent.wait(LIMIT_S)
    assert wait_until(lambda: not any(map(is_alive, pids)), LIMIT_S)


def test_a_server_that_ends_at_its_start_is_an_error_with_its_words(tmp_path: Path, port: int) -> None:
    code = "import sys; print('loading'); print('ValueError: no such drafter'); sys.exit(3)"
    with pytest.raises(UserError) as caught, server_of(tmp_path, port, code) as server:
        server.wait_until_healthy("/", LIMIT_S)
    assert "exit code 3" in str(caught.value)
    assert "ValueError: no such drafter" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert "loading" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, port: int) -> None:
    with pytest.raises(Stalled) as caught, server_of(tmp_path, port, "import time; time.sleep(600)") as server:
        server.wait_until_healthy("/", 0.5)
    assert str(tmp_path / "log") in str(caught.value)


def test_a_refusal_and_a_reply_that_is_no_json_are_errors(tmp_path: Path, port: int) -> None:
    with server_of(tmp_path, port) as server:
        server.wait_until_healthy("/", LIMIT_S)
        with pytest.raises(UserError, match=r"answered /ask with 400: .*wrong"):
            server.post("/ask", "wrong")  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"which is no JSON: b'no JSON'"):
            server.post("/ask", "text")  # type: ignore[arg-type]


def test_a_server_that_dies_under_a_request_is_named(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_offline.train.serve_check.server.LAST_S", LIMIT_S)  # a slow machine
    with pytest.raises(UserError) as caught, server_of(tmp_path, port) as server:
        server.wait_until_healthy("/", LIMIT_S)
        server.post("/", "die")  # type: ignore[arg-type]
    assert "exit code 3" in str(caught.value)
    assert "all is lost" in str(caught.value)


def test_a_reply_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = Server([], {}, silent.getsockname()[1], tmp_path / "log", 0.3)
        with pytest.raises(Stalled, match="reply to /ask"):
            server.post("/ask", {})


def test_a_proxy_is_not_asked_for_loopback(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server_of(tmp_path, port) as server:
        server.wait_until_healthy("/", LIMIT_S)
        assert json.dumps(server.post("/", [1])) == '{"said": [1]}'  # type: ignore[arg-type]


def test_the_keeper_ends_at_once_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    from dflash_offline.train.serve_check import keeper

    mark = tmp_path / "started"
    command = [sys.executable, keeper.__file__, str(os.getppid()), "1", "touch", str(mark)]
    assert subprocess.run(command).returncode == 1
    assert not mark.exists()
