"""A config written down: as plain values and their digest, as options for a shell, as TOML, as lines for people.

A leaf beside `settings`, which reads what is written here.
"""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from .settings import is_section
from .toml_file import toml, toml_key


def as_dict(config: Any) -> dict[str, Any]:
    """The config as plain nested JSON types."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def digest(config: Any) -> str:
    """First 16 hex digits of the sha256 of the resolved config."""
    return hashlib.sha256(json.dumps(as_dict(config), sort_keys=True).encode()).hexdigest()[:16]


def as_options(config: Any, always: Iterable[str] = ()) -> str:
    """The options, quoted for a shell, that make this flat config: those of `always` and all that are not default."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), field.metadata["flag"]
        if value == field.default and field.name not in always:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if flag is None:
            words += ["--set", f"{field.name}={text.lower() if isinstance(value, bool) else text}"]
        elif isinstance(value, bool):
            words.append(flag.split("/")[0 if value else -1])
        else:
            words += [flag, text]
    return shlex.join(words)


def as_toml(config: Any, name: str) -> str:
    """The resolved config as a TOML table that `resolve` reads back; fields that are None are left out.

    What is in a free dict keeps its order: TOML would want tables behind all else, so that those in it are inline.
    """
    lines: list[str] = []

    def table(values: Mapping[str, Any], path: str, config_class: type | None) -> None:
        lines.append(f"[{path}]")
        later: list[tuple[str, Any, type | None]] = []
        for key, value in values.items():
            if isinstance(value, dict) and config_class is not None:
                inner = get_type_hints(config_class)[key] if is_section(config_class, key) else None
                later.append((f"{path}.{toml_key(key)}", value, inner))
            elif value is not None:
                lines.append(f"{toml_key(key)} = {toml(value)}")
        for inner_path, value, inner in later:
            lines.append("")
            table(value, inner_path, inner)

    table(as_dict(config), name, type(config))
    return "\n".join(lines) + "\n"


def as_lines(facts: Mapping[str, Any]) -> str:
    """Facts as aligned lines `name  value`, for people."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())
