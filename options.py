"""Command-line options made from config dataclasses, and the config that they make.

A field with a flag (`settings.setting(..., flag=...)`) is an option, so that its name, text and default have one
owner; every field can be given by `--config` and `--set`. Knows click and dataclasses; knows no command and no room.
"""

import dataclasses
import os
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import click

from .progress import say

DEFAULT_FILE = "dflash.toml"
SHOWN: dict[type, tuple[click.ParamType, str]] = {int: (click.INT, "N"), float: (click.FLOAT, "X")}
"""How click reads a field of a type, and what stands for its value in the help; anything else is text."""


def options_of(config_class: type, table: str) -> list[click.Option]:
    """The options of a command that reads this config: its flags, `--config` with a `table`, and `--set`."""
    file = click.Option(
        ["--config"],
        metavar="FILE",
        help=f"TOML file with a table [{table}]; default: {DEFAULT_FILE} where it exists",
    )
    fields = click.Option(
        ["--set"],
        multiple=True,
        metavar="FIELD=VALUE",
        help="any field of the config, like --set optim.clip=0.5; may be repeated",
    )
    return [*flags_of(config_class), file, fields]


def flags_of(config_class: type, prefix: str = "") -> list[click.Option]:
    """One option for every field that names a flag, sections included."""
    found: list[click.Option] = []
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += flags_of(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        elif field.metadata.get("flag"):
            found.append(option(field, hint, prefix + field.name))
    return found


def option(field: "dataclasses.Field[Any]", hint: Any, path: str) -> click.Option:
    """The option of one field; `path` is its dotted name."""
    kinds = [
        k for k in (get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)) if k is not type(None)
    ]
    text = field.metadata["text"]
    if field.default not in (None, dataclasses.MISSING) and "default" not in text:
        text += f"  [default: {'on' if field.default is True else 'off' if field.default is False else field.default}]"
    names, hidden = [field.metadata["flag"], path.replace(".", "__")], not field.metadata["is_shown"]
    if kinds == [bool]:
        return click.Option(names, is_flag=True, default=None, help=text, hidden=hidden)
    if get_origin(kinds[0]) is tuple and ... not in (items := get_args(kinds[0])):
        return click.Option(
            names, nargs=len(items), metavar=" ".join(["TEXT"] * len(items)), default=None, help=text, hidden=hidden
        )
    kind, metavar = SHOWN.get(kinds[0], (click.STRING, "TEXT"))
    return click.Option(names, type=kind, metavar=metavar, default=None, help=text, hidden=hidden)


def resolved(config_class: type, table: str, given: dict[str, Any], *, default_file: str = DEFAULT_FILE) -> Any:
    """The config of what click was given: defaults, then the config file, then the options, then --set.

    Without `--config` the file is `default_file`, where it exists; '' for none.
    """
    from . import settings  # here, because `dflash --help` reads no config

    settings.require_text("the working folder", os.getcwd())
    file, overrides = given.pop("config"), given.pop("set")
    if file is None and default_file and Path(default_file).is_file():
        say(f"settings from {default_file}")
        file = default_file
    options = {key.replace("__", "."): value for key, value in given.items()}
    return settings.resolve(
        config_class, name=table, file=Path(file) if file else None, overrides=overrides, options=options
    )


def made(
    name: str, run: Callable[..., None], config_class: type | None, arguments: Sequence[click.Parameter] = ()
) -> click.Command:
    """A click command with these arguments, and the options of a config class."""
    params = [*arguments, *(options_of(config_class, table_name(name)) if config_class is not None else [])]

    def run_checked(**given: Any) -> None:
        require_texts(params, given)
        run(**given)

    return click.Command(name, callback=run_checked, params=params)


def require_texts(params: Iterable[click.Parameter], given: dict[str, Any]) -> None:
    """Raises UserError, naming the parameter, for what no file of ours can hold, like a path that is not UTF-8."""
    from .settings import require_text

    for param in params:
        value = given.get(param.name or "")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                require_text(param.human_readable_name if isinstance(param, click.Argument) else param.opts[0], text)


def table_name(command: str) -> str:
    """The table of a config file that a command reads."""
    return "extract" if command == "plan" else command
