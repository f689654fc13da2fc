"""The file of an exam's result: where it may be written, and how it is read back.

Knows names and JSON, not what the numbers mean; no torch.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import UserError
from ...store.files import NewFile, storage_error
from ..value_rules import (
    MOST_COUNT,
    Rule,
    is_count,
    is_finite,
    is_object,
    is_text,
    object_of,
    or_none,
    pair_of,
    require_unicode,
    values_of,
    wrong_key,
)

EVALUATION_NAME, OFFLINE_NAME = "evaluation.json", "evaluation-offline.json"  # in RUN
PER_PROMPT = "per_prompt"
MARKS = ("mode", "definitions")  # keys that every result has
KEPT = ("name", "prompt_sha256", "num_cycles", "num_tokens")  # keys that are read of a prompt
COUNTS = ("num_cycles", "num_tokens")  # the others are texts


def result_path(run_dir: Path, out: str | None, is_offline: bool) -> Path:
    """Where the result goes: `out`, else a name of its own in RUN. Makes the folder and tries to write there.

    Raises UserError where nothing can be written, for a folder, and for an `out` that is there and
    holds anything but an earlier result.
    """
    path = Path(out) if out else run_dir / (OFFLINE_NAME if is_offline else EVALUATION_NAME)
    try:
        if path.is_dir():
            raise UserError(f"{str(path)!r} is a folder", "a file for the result of the exam", "name a file with --out")
        if out and path.exists():
            require_evaluation(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, path) from error
    NewFile(path).abort()
    return path


def require_evaluation(path: Path) -> None:
    """Raises UserError unless the file may be replaced by a new result."""
    try:
        read_evaluation(path)
    except UserError as error:
        raise UserError(
            f"{str(path)!r} is there and is not the result of an evaluation",
            "a new file, or the result of an earlier evaluation",
            "name another with --out, or remove it",
        ) from error


def read_evaluation(path: Path) -> dict[str, Any]:
    """The result in a file. Raises UserError where it holds none."""
    reason = f"the keys {' and '.join(MARKS)} are not there"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        require_unicode(found)
    except (ValueError, RecursionError) as error:
        found, reason = None, f"{type(error).__name__}: {error}".replace("\n", " ")
    except OSError as error:
        raise UserError(
            f"{str(path)!r} cannot be read: {error}", "a readable file", "check the disk and rights"
        ) from error
    if not isinstance(found, dict) or not all(mark in found for mark in MARKS):
        raise UserError(
            f"{str(path)!r} is broken: {reason}", "the result of `dflash evaluate`", "remove it, or evaluate again"
        )
    return found


def prompts_of(
    result: Mapping[str, Any], where: str, keys: Sequence[str] = KEPT
) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The measured prompts of a result, each with these keys, by their names and the digests of what was asked.

    Raises UserError for a result that does not keep them, or keeps too little of one.
    """
    if not isinstance(result.get(PER_PROMPT), list):
        raise UserError(
            f"{where!r} says nothing of single prompts: an earlier version wrote it",
            f"the key {PER_PROMPT}",
            "evaluate again",
        )
    for number, prompt in enumerate(result[PER_PROMPT]):
        if missing := [key for key in keys if not isinstance(prompt, dict) or key not in prompt]:
            raise UserError(
                f"{where!r} says no {missing[0]} of its prompt {number}",
                f"the keys {', '.join(keys)}",
                "evaluate again",
            )
        if wrong := [key for key in keys if not is_kept_as(key, prompt[key])]:
            raise UserError(
                f"{where!r} says {wrong[0]} = {prompt[wrong[0]]!r} of its prompt {number}",
                "the result as `dflash evaluate` wrote it",
                "evaluate again",
            )
    return {(prompt["name"], prompt["prompt_sha256"]): prompt for prompt in result[PER_PROMPT] if prompt["num_cycles"]}


def is_kept_as(key: str, value: Any) -> bool:
    """Whether a value is what results hold under a key of a prompt: a count, or a text."""
    return is_count(value) if key in COUNTS else is_text(value)


def is_mean(value: Any) -> bool:
    """A mean of counts, or an end of its interval."""
    return is_finite(value) and abs(value) <= MOST_COUNT


MEASURED = {
    "acceptance_length": or_none(is_mean),
    "intervals": or_none(object_of({"acceptance_length": or_none(pair_of(is_mean))})),
    "num_measured": or_none(is_count),
}
"""The numbers of all prompts or of a task, which may be missing."""
OF_RESULT = {**MEASURED, "definitions": is_object, "by_task": or_none(values_of(object_of(MEASURED)))}


def strange_key(result: Mapping[str, Any], needed: Mapping[str, Rule]) -> str | None:
    """A key that holds something else than results hold there; None where all are as written.

    Looked at are what a result says as a whole and by task, and the keys of `needed` by their rules.
    """
    return wrong_key(result, OF_RESULT) or wrong_key(result, needed)


def strange(path: Path, name: str, value: Any) -> UserError:
    return UserError(
        f"{str(path)!r} has {name} = {value!r:.200}", "the result as `dflash evaluate` wrote it", "evaluate again"
    )
