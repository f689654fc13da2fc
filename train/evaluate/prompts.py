"""The prompts of an exam: from a JSONL file, or from the held-out samples of a store.

Every line that gives no prompt is named with its reason; none disappears and none ends the
exam. What a line of a file asks, as token ids, is told by a function that the caller hands over.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import UserError
from ...store.reader import StoreReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Token ids up to where the answer starts; `answer` is the right one, where it is known."""

    ids: list[int]
    name: str
    task: str = ""
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of an exam, and what was left out: (name of the line or sample, reason)."""

    prompts: list[Prompt]
    left_out: list[tuple[str, str]]


def read_lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a prompts file that are not blank, each with its name: FILE:NUMBER.

    A byte-order mark is skipped; only a line feed ends a line. Raises UserError when the file
    cannot be read or is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"prompts file {str(path)!r} cannot be read: {error}", "a readable JSONL file in UTF-8", "check --prompts"
        ) from error
    return [(f"{path.name}:{i}", line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]


def asked_prompts(lines: Iterable[tuple[str, str]], ids_of: Callable[[Any], list[int]], limit: int | None) -> Prompts:
    """The first `limit` prompts of named JSON lines; `ids_of` gives the token ids that a line's value asks.

    What a line asks is for `ids_of` to say, which raises ValueError where it is nothing; beside it 'answer' (the
    right answer's text), 'task' and 'id' are read.
    """
    found = Prompts([], [])
    for name, line in lines:
        if limit is not None and len(found.prompts) >= limit:
            break
        try:
            found.prompts.append(parse_line(line, name, ids_of))
        except (ValueError, RecursionError) as error:
            found.left_out.append((name, f"{type(error).__name__}: {error}"))
    return found


def parse_line(line: str, name: str, ids_of: Callable[[Any], list[int]]) -> Prompt:
    """One line as a prompt; raises ValueError or RecursionError when it is none."""
    record = json.loads(line)
    ids = ids_of(record)
    answer = record.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"'answer' is a {type(answer).__name__}, not a text")
    task, label = record.get("task"), record.get("id")
    return Prompt(
        ids=ids,
        name=name if label is None else f"{name} (id {label})",
        task="" if task is None else str(task),
        answer=answer,
    )


def recorded_prompts(reader: StoreReader, rows: Iterable[int], *, limit: int | None) -> Prompts:
    """The tokens of a store's samples (reader numbers) before their first supervised token."""
    found = Prompts([], [])
    for i in map(int, rows):
        if limit is not None and len(found.prompts) >= limit:
            break
        name = f"sample {reader.samples.sample_id[i]}"
        ids, loss_mask = reader.tokens(i)
        first = int(np.argmax(loss_mask)) if loss_mask.any() else 0
        if first == 0:
            found.left_out.append((name, "no token before the first supervised one"))
        else:
            found.prompts.append(Prompt(ids=ids[:first].tolist(), name=name, task=str(reader.samples.task[i])))
    return found
