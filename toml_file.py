"""A TOML file as the settings of the commands: read into plain tables, and written value by value.

A leaf: it knows the names of the commands' tables, and none of a field. What is no TOML, or more than settings can be,
is refused here.
"""

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import UserError, system_reason

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
NOT_IN_TOML = re.compile(r"[\x7f\ud800-\udfff]")  # characters that JSON's strings may hold as they are
# The tables of a config file, one a command.
TABLES = ("prepare", "regenerate", "extract", "recode", "train", "sweep", "evaluate", "export", "serve-check", "demo")
MOST_NESTED = 32  # lists and tables within one another
MOST_BITS = 4096  # of a whole number: Python prints up to 4,300 digits, some 14,000 bits


def read_table(file: Path, name: str) -> dict[str, Any]:
    """Table `name` of a TOML file, empty where the file has none."""
    if not file.is_file():
        raise UserError(f"config file {str(file)!r} does not exist", "a readable TOML file", "check the path")
    try:
        content = toml_content(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"config file {str(file)!r} cannot be read: {system_reason(error)}",
            "a file that you may read",
            "check rights and disk",
        ) from error
    except ValueError as error:
        raise UserError(
            f"config file {str(file)!r} is not TOML as settings are: {error}", "valid TOML", "mend that line"
        ) from error
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


def toml_content(text: str) -> dict[str, Any]:
    """What a text says as TOML. Raises ValueError, of one line, for what is none, or more than settings can be."""
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"its values are nested more than {MOST_NESTED} deep") from None
    except ValueError as error:  # also of int(), for thousands of digits, with advice for programmers
        raise ValueError(str(error).partition("; use sys.")[0]) from error
    level: list[Any] = [content]
    for _ in range(MOST_NESTED):
        if any(isinstance(value, int) and value.bit_length() > MOST_BITS for value in level):
            raise ValueError(f"it has a whole number of more than {MOST_BITS} bits")
        level = [part for value in level for part in parts_of(value)]
    if level:
        raise ValueError(f"its values are nested more than {MOST_NESTED} deep")
    return content


def parts_of(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def toml(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return NOT_IN_TOML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def toml_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else toml(key)
