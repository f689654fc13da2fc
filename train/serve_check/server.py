"""One engine's server on loopback: started with a limit, asked by HTTP, ended with all of its processes.

Knows processes, a log file and JSON over HTTP; what is asked, and what it means, is for `vllm.py` and `sglang.py`.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ... import UserError
from ...store.files import storage_error
from ...watch import Stalled
from . import keeper

HOST = "127.0.0.1"
PAUSE_S = 0.25  # between two looks whether the server answers
HEALTH_S = 5.0  # of one such look
GRACE_S = 5.0  # between asking the engine to end and killing it
LAST_S = 2.0  # for a server that dropped a connection to be gone
SHOWN_LINES, SHOWN_CHARACTERS = 12, 240  # of the log and of a reply, in an error


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Server:
    """A running engine. Use as a context manager; from the main thread, with whose end the engine ends too.

    `command` is started with `environment` added to this process's own; what it prints goes to `log_path`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log_path: Path,
        request_s: float,
    ) -> None:
        self.url, self.log_path, self.request_s = f"http://{HOST}:{port}", log_path, request_s
        self.command = list(command)
        self.environment = {**os.environ, **environment}
        self.opener = build_opener(ProxyHandler({}))  # loopback is reached by no proxy

    def __enter__(self) -> Self:
        kept = [sys.executable, keeper.__file__, str(os.getpid()), str(GRACE_S), *self.command]
        try:
            with self.log_path.open("wb") as log:
                self.process = subprocess.Popen(
                    kept,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    process_group=0,  # Ctrl-C of a terminal is heard by us alone
                )
        except OSError as error:
            raise storage_error(error, self.log_path) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(4 * GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait_until_healthy(self, path: str, limit_s: float) -> float:
        """Seconds until `path` answered 200.

        Raises UserError with the log's end where the engine ends first, Stalled after `limit_s`.
        """
        started = time.monotonic()
        while not self.is_healthy(path):
            self.require_running()
            waited_s = time.monotonic() - started
            if waited_s > limit_s:
                raise Stalled("serve-check", f"the engine to answer (its output is in {self.log_path})", waited_s)
            time.sleep(PAUSE_S)
        return time.monotonic() - started

    def is_healthy(self, path: str) -> bool:
        try:
            with self.opener.open(self.url + path, timeout=HEALTH_S) as response:
                return response.status == 200
        except (OSError, HTTPException):
            return False

    def require_running(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise UserError(
                f"the engine ended with exit code {code}: {self.last_words()}",
                "a server that goes on until it is told to end",
                f"read its output in {str(self.log_path)!r}; --engine-args gives it further arguments",
            )

    def last_words(self) -> str:
        """The last lines of the log, one after another."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        faults = [line for line in lines if "Error" in line] or lines
        return " | ".join(line[:SHOWN_CHARACTERS] for line in dict.fromkeys(faults[-SHOWN_LINES:])) or "it said nothing"

    def get_text(self, path: str) -> str:
        """The body of a GET."""
        return self.reply(Request(self.url + path)).decode("utf-8", errors="replace")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a POST of JSON. Raises UserError, with the engine's words, for any other reply."""
        data = json.dumps(body, allow_nan=False).encode()
        raw = self.reply(Request(self.url + path, data, {"Content-Type": "application/json"}))
        try:
            return json.loads(raw)
        except ValueError as error:
            raise self.fault(path, f"which is no JSON: {raw[:SHOWN_CHARACTERS]!r}") from error

    def reply(self, request: Request) -> bytes:
        path = request.full_url.removeprefix(self.url)
        try:
            with self.opener.open(request, timeout=self.request_s) as response:
                return response.read()
        except HTTPError as error:
            words = error.read().decode("utf-8", errors="replace")[:SHOWN_CHARACTERS]
            raise self.fault(path, f"{error.code}: {words}") from error
        except TimeoutError as error:
            raise self.stalled(path) from error
        except (OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise self.stalled(path) from error
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_S)  # a server that dies drops its connections a moment before
            self.require_running()
            raise self.fault(path, f"{type(error).__name__}: {error}") from error

    def stalled(self, path: str) -> Stalled:
        return Stalled(
            "serve-check", f"the engine's reply to {path} (its output is in {self.log_path})", self.request_s
        )

    def fault(self, path: str, words: str) -> UserError:
        return UserError(
            f"the engine answered {path} with {words}".replace("\n", " "),
            "a server of a version that this package knows (see docs/serving.md)",
            f"read its output in {str(self.log_path)!r}",
        )
