"""Config dataclasses: how a field carries its text, and how files and overrides fill it.

A leaf, like `watch`: it knows dataclasses, and no room; `toml_file` reads the files. A config class is frozen,
keyword-only and slotted; every field is made by `setting`, so that its one line of text
serves the command line, the printed config and the documentation alike.
"""

import dataclasses
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from . import UserError
from .toml_file import read_table, toml_content

MOST_WAIT_S = 1e6  # of a setting in seconds: the system's polls take little more
INTEGER = re.compile(r"-?[0-9]{1,18}")  # of any number of digits, int() may fail
NOT_FINITE = ("nan", "inf", "-inf")  # TOML's numbers that `plain` writes as text
SHOWN_DIGITS = 12  # of a number that is too long to be shown
T = TypeVar("T")
Config = TypeVar("Config")


def setting(
    default: T, text: str, *, flag: str | None = None, is_shown: bool = True, idle_beside: str | None = None
) -> T:
    """A dataclass field with a default, one line of text (with its unit) and perhaps an option.

    `flag` is the option's name on the command line, like `--shards`; without it the field is
    reached by `--config` and `--set` only. An option that `--help` does not show is named in the
    documentation, and by the error that asks for it. `idle_beside` names a field of the same class:
    where that one is given, nothing reads this one.
    """
    metadata = {"text": text, "flag": flag, "is_shown": is_shown, "idle_beside": idle_beside}
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
    Raises UserError for an unknown field, a value of the wrong type or that nothing reads, or a broken file.
    """
    written: dict[str, Any] = {}
    if file is not None:
        flatten(read_table(file, name), "", written, config_class)
    values = {key: value for key, value in (options or {}).items() if value is not None}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise UserError(
                f"--set {override!r} holds no '='", "--set field=value or --set section.field=value", "add the value"
            )
        values[key.strip()] = Typed(text.strip())
    if not is_saved(config_class, written):
        require_read_beside(config_class, written, written)
    require_read_beside(config_class, values, written | values)
    return assemble(config_class, written | values, "")


def is_saved(config_class: type, written: Mapping[str, Any]) -> bool:
    """Whether a table was written by `as_toml`, which gives every field that is not None: nobody types most of them.

    Not all of them, since a file of an older version knows fewer.
    """
    return 2 * len(written) > num_fields(config_class)


def num_fields(config_class: type) -> int:
    hints = get_type_hints(config_class)
    return sum(num_fields(hint) if dataclasses.is_dataclass(hint) else 1 for hint in hints.values())  # type: ignore[arg-type]


def require_read_beside(config_class: type, given: Mapping[str, Any], all_given: Mapping[str, Any]) -> None:
    """Raises UserError for a field of `given` that nothing reads, because another one is given, too."""
    for field in dataclasses.fields(config_class):
        name, other = field.name, field.metadata.get("idle_beside")
        if name in given and other is not None and not is_none(all_given.get(other)):
            raise UserError(
                f"{name} = {given[name]!r} does nothing beside {other} = {all_given[other]!r}",
                f"one of {name} and {other}",
                f"drop {name}, or set {other} to 'none'",
            )


def is_none(value: Any) -> bool:
    """Whether a given value takes back what was given before."""
    return value is None or (value.parsed() if isinstance(value, Typed) else value) == "none"


def flatten(table: Mapping[str, Any], prefix: str, out: dict[str, Any], config_class: type) -> None:
    """Writes nested tables as dotted names; a field that is itself a dict stays whole.

    Raises UserError for a field that is written twice, under a quoted name like "optim.lr" and in its table.
    """
    sections = {f.name: f.type for f in dataclasses.fields(config_class) if is_section(config_class, f.name)}
    hints = get_type_hints(config_class)
    for key, value in table.items():
        if key in sections and isinstance(value, dict):
            flatten(value, f"{prefix}{key}.", out, hints[key])
        else:
            require_once(f"{prefix}{key}", value, out)
            out[f"{prefix}{key}"] = value


def require_once(name: str, value: Any, out: Mapping[str, Any]) -> None:
    """Raises UserError where `out` has this field already, or has a field both whole and in parts."""
    for known, held in out.items():
        if known == name or known.startswith(f"{name}.") or name.startswith(f"{known}."):
            raise UserError(
                f"{min(known, name)} is written twice: {known} = {held!r} and {name} = {value!r}",
                "each field once, under a quoted name or in its table",
                "drop one of the two",
            )


def is_section(config_class: type, field_name: str) -> bool:
    return dataclasses.is_dataclass(get_type_hints(config_class).get(field_name))


@dataclass(frozen=True, slots=True)
class Typed:
    """A value as typed after `--set`: what it means is for the field's type to say."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def parsed(self) -> Any:
        """TOML where it parses to one value, else the text itself."""
        try:
            found = toml_content(f"value = {self.text}")
        except ValueError:
            return self.text
        return found["value"] if len(found) == 1 else self.text

    def meant(self, kinds: Iterable[Any]) -> Any:
        """The parsed value; for a text field the text as typed, or what stands between TOML's quotes."""
        parsed = self.parsed()
        return self.text if str in kinds and not isinstance(parsed, str) else parsed


def build(config_class: type[Config], values: Mapping[str, Any], prefix: str) -> Config:
    """The config of values that were all given in one place, by their dotted names. Raises UserError as `resolve`."""
    require_read_beside(config_class, values, values)
    return assemble(config_class, values, prefix)


def assemble(config_class: type[Config], values: Mapping[str, Any], prefix: str) -> Config:
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
    made |= {k: assemble(hints[k], v, f"{prefix}{k}.") for k, v in nested.items()}
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
                if get_args(kind)[0] is int:
                    require_whole_numbers(name, value, items)
                return tuple(convert(item, get_args(kind)[0], name) for item in items)
        elif origin is float and is_number(value, (int, float)):
            return as_float(name, value)
        elif origin is int and is_number(value, (int,)):
            return value
        elif origin is str and is_number(value, (int, float)):
            return str(value)
        elif origin is str and isinstance(value, (date, time)):
            return value.isoformat()
        elif origin is dict and isinstance(value, dict):
            return plain(value)
        elif origin is str and isinstance(value, str):
            require_text(name, value)
            return value
        elif origin is bool and isinstance(value, bool):
            return value
    wanted = " or ".join("none" if k is type(None) else getattr(k, "__name__", str(k)) for k in kinds)
    is_not_finite = isinstance(value, str) and value in NOT_FINITE
    found = f"{value} is no finite number" if is_not_finite else f"{value!r} is a {type(value).__name__}"
    raise UserError(f"{name} = {found}", f"{wanted}", f"give {name} another value")


def require_whole_numbers(name: str, value: Any, items: Iterable[Any]) -> None:
    """Raises UserError for a text among the items of a list of numbers: what stood between two commas and is none."""
    wrong = next((item for item in items if isinstance(item, str)), None)
    if wrong is None:
        return
    found = f"{wrong[:SHOWN_DIGITS]!r}{'...' if len(wrong) > SHOWN_DIGITS else ''}" if wrong else "nothing"
    raise UserError(
        f"{name} = {str(value)[:40]!r} holds {found} in the place of a number",
        "whole numbers of up to 18 digits with commas between them, like 1,9,17",
        f"correct {name}, or drop it",
    )


def as_float(name: str, value: float) -> float:
    """A number as a float. Raises UserError for a whole number beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        digits = str(value)
        raise UserError(
            f"{name} = {digits[:SHOWN_DIGITS]}... ({len(digits.lstrip('-'))} digits) is larger than any float",
            "a number within 1.8e308 on either side of 0",
            f"give {name} another value",
        ) from None


def require_text(name: str, value: str) -> None:
    """Raises UserError for text that no file of ours can hold: a path of bytes that are not UTF-8, or with a zero byte.

    Python has such bytes as lone surrogates.
    """
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(
            f"{name} {value!r} {'holds a zero byte' if chr(0) in value else 'is not UTF-8'}",
            "text in UTF-8, also as the name of a file or folder, since other files tell it",
            "rename it, and give the new name",
        )


def field_value(config_class: type, name: str, value: Any) -> Any:
    """A value as the field of a dotted name takes it; as it was given where no field of that name takes it."""
    head, _, rest = name.partition(".")
    hint = get_type_hints(config_class).get(head)
    if hint is None or dataclasses.is_dataclass(hint):
        return field_value(hint, rest, value) if hint is not None and rest else value  # type: ignore[arg-type]
    try:
        return convert(value, hint, name)
    except UserError:
        return value


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


def require(ok: bool, name: str, value: Any, rule: str) -> None:
    """One rule of a config's `__post_init__`: names the field, its value and the rule."""
    if not ok:
        raise UserError(f"{name} = {value!r}", rule, f"change {name}")


def require_wait(name: str, seconds: float) -> None:
    """The rule of every longest wait."""
    require(0 < seconds <= MOST_WAIT_S, name, seconds, "more than 0 seconds, at most a million")
