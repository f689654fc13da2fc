"""Config dataclasses: how a field carries its text, and how files and overrides fill it.

A leaf, like `watch`: it knows dataclasses and TOML, and no room. A config class is frozen,
keyword-only and slotted; every field is made by `setting`, so that its one line of text
serves the command line, the printed config and the documentation alike.
"""

import dataclasses
import hashlib
import json
import math
import re
import shlex
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from . import UserError, system_reason

INTEGER = re.compile(r"-?[0-9]+")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
NOT_IN_TOML = re.compile(r"[\x7f\ud800-\udfff]")  # characters that JSON's strings may hold as they are
# The tables of a config file, one a command.
TABLES = ("prepare", "regenerate", "extract", "recode", "train", "sweep", "evaluate", "export", "serve-check", "demo")
T = TypeVar("T")
Config = TypeVar("Config")


def setting(default: T, text: str, *, flag: str | None = None, is_shown: bool = True) -> T:
    """A dataclass field with a default, one line of text (with its unit) and perhaps an option.

    `flag` is the option's name on the command line, like `--shards`; without it the field is
    reached by `--config` and `--set` only. An option that `--help` does not show is named in the
    documentation, and by the error that asks for it.
    """
    metadata = {"text": text, "flag": flag, "is_shown": is_shown}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)  # type: ignore[return-value]
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)  # type: ignore[return-value]
    return dataclasses.field(default=default, metadata=metadata)  # type: ignore[return-value]


def section(config_class: type[T], text: str) -> T:
    """A field that holds another config class, filled with that class's defaults."""
    return dataclasses.field(default_factory=config_class, metadata={"text": text, "flag": None})


def resolve(
    config_class: type[Config],
    *,
    name: str,
    file: Path | None = None,
    overrides: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Config:
    """The config of one command: defaults, then table `name` of the file, options, overrides.

    `options` maps dotted field names to values given on the command line; None means not given.
    Raises UserError for an unknown field, a value of the wrong type, or a broken file.
    """
    values: dict[str, Any] = {}
    if file is not None:
        flatten(read_table(file, name), "", values, config_class)
    values |= {key: value for key, value in (options or {}).items() if value is not None}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise UserError(
                f"--set {override!r} holds no '='", "--set field=value or --set section.field=value", "add the value"
            )
        values[key.strip()] = Typed(text.strip())
    return build(config_class, values, "")


def read_table(file: Path, name: str) -> dict[str, Any]:
    """Table `name` of a TOML file, empty where the file has none."""
    if not file.is_file():
        raise UserError(f"config file {str(file)!r} does not exist", "a readable TOML file", "check the path")
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"config file {str(file)!r} cannot be read: {system_reason(error)}",
            "a file that you may read",
            "check rights and disk",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config file {str(file)!r} is not TOML: {error}", "valid TOML", "mend that line") from error
    strange = sorted(set(content) - {*TABLES, name})
    if strange:
        raise UserError(
            f"{str(file)!r} holds {strange[0]!r} at its top",
            f"only the tables {', '.join(f'[{table}]' for table in TABLES)}, with sections like [train.optim] below",
            "move it below the table of its command, or remove it",
        )
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{name!r} in {str(file)!r} is {table!r}", f"a table [{name}]", "write it as a table")
    return table


def flatten(table: Mapping[str, Any], prefix: str, out: dict[str, Any], config_class: type) -> None:
    """Writes nested tables as dotted names; a field that is itself a dict stays whole."""
    sections = {f.name: f.type for f in dataclasses.fields(config_class) if is_section(config_class, f.name)}
    hints = get_type_hints(config_class)
    for key, value in table.items():
        if key in sections and isinstance(value, dict):
            flatten(value, f"{prefix}{key}.", out, hints[key])
        else:
            out[f"{prefix}{key}"] = value


def is_section(config_class: type, field_name: str) -> bool:
    return dataclasses.is_dataclass(get_type_hints(config_class).get(field_name))


@dataclass(frozen=True, slots=True)
class Typed:
    """A value as typed after `--set`: what it means is for the field's type to say."""

    text: str

    def parsed(self) -> Any:
        """TOML where it parses to one value, else the text itself."""
        try:
            found = tomllib.loads(f"value = {self.text}")
        except tomllib.TOMLDecodeError:
            return self.text
        return found["value"] if len(found) == 1 else self.text

    def meant(self, kinds: Iterable[Any]) -> Any:
        """The parsed value; for a text field the text as typed, or what stands between TOML's quotes."""
        parsed = self.parsed()
        return self.text if str in kinds and not isinstance(parsed, str) else parsed


def build(config_class: type[Config], values: Mapping[str, Any], prefix: str) -> Config:
    """Makes the (nested) config; every leftover name is an error."""
    hints = get_type_hints(config_class)
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        if head not in hints:
            raise UserError(
                f"unknown field {prefix + key!r}",
                f"one of {', '.join(sorted(prefix + h for h in hints))}",
                "correct the name",
            )
        if is_section(config_class, head):
            if not dot:
                raise UserError(f"{prefix + head!r} is a section", f"{prefix + head}.field=value", "name a field of it")
            nested.setdefault(head, {})[rest] = value
        elif dot:
            whole = own.get(head, {})
            own[head] = whole.parsed() if isinstance(whole, Typed) else whole
            if not isinstance(own[head], dict):
                raise UserError(f"{prefix + head!r} has no parts", f"{prefix + head}=value", "drop the part")
            own[head] = {**own[head], rest: value}
        else:
            own[head] = value
    made = {k: convert(v, hints[k], prefix + k) for k, v in own.items()}
    made |= {k: build(hints[k], v, f"{prefix}{k}.") for k, v in nested.items()}
    return config_class(**made)


def convert(value: Any, hint: Any, name: str) -> Any:
    """Checks a value against its field's type; accepts int for float, lists for tuples, numbers and dates for text."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, Typed):
        value = value.meant(kinds)
    if type(None) in kinds and value in (None, "none"):
        return None
    for kind in kinds:
        origin = get_origin(kind) or kind
        if origin is tuple:
            items = tuple_items(value)
            if items is not None:
                return tuple(convert(item, get_args(kind)[0], name) for item in items)
        elif origin is float and is_number(value, (int, float)):
            return float(value)
        elif origin is int and is_number(value, (int,)):
            return value
        elif origin is str and is_number(value, (int, float)):
            return str(value)
        elif origin is str and isinstance(value, (date, time)):
            return value.isoformat()
        elif origin is dict and isinstance(value, dict):
            return plain(value)
        elif origin in (bool, str) and isinstance(value, origin):
            return value
    wanted = " or ".join("none" if k is type(None) else getattr(k, "__name__", str(k)) for k in kinds)
    raise UserError(f"{name} = {value!r} is a {type(value).__name__}", f"{wanted}", f"give {name} another value")


def plain(value: Any) -> Any:
    """A free value in JSON's own types; dates and the numbers that JSON cannot write become text."""
    if isinstance(value, Typed):
        parsed = value.parsed()
        return value.text if is_outside_json(parsed) else plain(parsed)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    return str(value) if is_outside_json(value) else value


def is_outside_json(value: Any) -> bool:
    return isinstance(value, (date, time)) or (isinstance(value, float) and not math.isfinite(value))


def is_number(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def tuple_items(value: Any) -> list[Any] | None:
    """The items of a list, of one number, or of text like '1,9,17'; None for anything else."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        return [int(part) if INTEGER.fullmatch(part) else part for part in parts]
    return [value] if is_number(value, (int,)) else None


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
    """The resolved config as a TOML table that `resolve` reads back; fields that are None are left out."""
    lines: list[str] = []

    def table(values: Mapping[str, Any], path: str, config_class: type | None) -> None:
        lines.append(f"[{path}]")
        later: list[tuple[str, Any, type | None]] = []
        for key, value in values.items():
            if isinstance(value, dict):
                inner = get_type_hints(config_class)[key] if config_class and is_section(config_class, key) else None
                later.append((f"{path}.{toml_key(key)}", value, inner))
            elif value is not None:
                lines.append(f"{toml_key(key)} = {toml(value)}")
        for inner_path, value, inner in later:
            lines.append("")
            table(value, inner_path, inner)

    table(as_dict(config), name, type(config))
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return NOT_IN_TOML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def toml_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else toml(key)


def require(ok: bool, name: str, value: Any, rule: str) -> None:
    """One rule of a config's `__post_init__`: names the field, its value and the rule."""
    if not ok:
        raise UserError(f"{name} = {value!r}", rule, f"change {name}")


def as_lines(facts: Mapping[str, Any]) -> str:
    """Facts as aligned lines `name  value`, for people."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())
