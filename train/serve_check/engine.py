"""What a serving engine must answer for, and which one is installed in an interpreter.

Knows no engine's command or format; those are in `vllm.py` and `sglang.py`.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ... import UserError, system_reason
from .profile import Profile
from .server import SHOWN_CHARACTERS, Server

ASK_S = 60.0  # for an interpreter to say what it has installed
ASK = """
import json, sys
from importlib import metadata
from importlib.util import find_spec

packages, found = metadata.packages_distributions(), {}
for module in sys.argv[1:]:
    if find_spec(module) is not None:
        names = sorted(set(packages.get(module, [])))
        found[module] = [f"{name} {metadata.version(name)}" for name in names] or [f"{module} (of no package)"]
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What is served: folders of target and drafter, and how. `layout` is the drafter's format, 'zlab' or
    'speculators'; `max_tokens` the longest text, prompt and drafts included."""

    target: str
    folder: Path
    layout: str
    block_size: int
    dtype: str
    device_type: str
    max_tokens: int
    port: int
    extra: Sequence[str] = ()


class Engine(Protocol):
    """One kind of server, while it runs. Token ids are asked and answered; text is never decoded and encoded again."""

    name: str
    health_path: str

    def command(self, python: str, serving: Serving) -> list[str]:
        """The command line of the server."""
        ...

    def environment(self, serving: Serving) -> dict[str, str]:
        """Variables of the server beside this process's own."""
        ...

    def begin(self, server: Server) -> None:
        """The counters stand where they are; what follows is measured."""
        ...

    def answer(self, server: Server, ids: list[int], max_new_tokens: int) -> list[int]:
        """The greedy answer to a prompt, its stop token included."""
        ...

    def profile(self, server: Server, num_drafts: int) -> Profile:
        """The cycles since `begin`."""
        ...

    def chat_ids(self, server: Server, chat: Mapping[str, Any]) -> list[int] | None:
        """The prompt that the engine makes of a chat (messages, perhaps tools and chat_template_kwargs); None where
        it cannot be asked."""
        ...

    def text_ids(self, server: Server, text: str) -> list[int] | None:
        """The tokens of plain text, no special ones added; None where it cannot be asked."""
        ...


@dataclass(frozen=True, slots=True)
class Installed:
    """An engine in an interpreter, with the name and version of its package."""

    engine: Engine
    python: str
    package: str


def find_engine(python: str, wanted: str, engines: Sequence[Engine]) -> Installed:
    """The first engine of that name ('auto': of any) that the interpreter can import. Raises UserError for none."""
    names = [engine.name for engine in engines]
    found = installed(python, names)
    for engine in engines:
        if wanted in ("auto", engine.name) and engine.name in found:
            return Installed(engine, python, " + ".join(found[engine.name]))
    sought = " and ".join(names) if wanted == "auto" else wanted
    raise UserError(
        f"{python!r} has no {sought.replace(' and ', ' nor ')}",
        "an interpreter with a serving engine",
        "name it with --engine-python; docs/serving.md says how an environment with vLLM is made",
    )


def installed(python: str, modules: Sequence[str]) -> dict[str, list[str]]:
    """Those of the modules that the interpreter finds, each with its packages and their versions."""
    expected, advice = "an interpreter of Python 3.10 or later", "check --engine-python"
    try:
        done = subprocess.run([python, "-c", ASK, *modules], capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{python!r} said nothing within {ASK_S:g} s", expected, advice) from error
    except OSError as error:
        raise UserError(f"{python!r} cannot be run: {system_reason(error)}", expected, advice) from error
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        words = " ".join(done.stderr.split())[-SHOWN_CHARACTERS:]
        raise UserError(f"{python!r} ended with exit code {done.returncode}: {words}", expected, advice) from error
