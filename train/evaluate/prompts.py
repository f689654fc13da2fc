"""The prompts of an exam: from a file, from the packaged set, or from the held-out samples of a store.

Every line that gives no prompt is named with its reason; none disappears and none ends the
exam. How a file is read, and what a line asks as token ids, is told by functions that the caller hands over.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ... import UserError
from ...store.reader import StoreReader
from .acceptance import AnswerCycles, Cycle
from .formats import Question, one_line, question_of, user

STANDARD = "standard"  # the name of the packaged prompts
PACKAGED = Path(__file__).parent / "prompts-standard.jsonl"
LABEL_LENGTH = 60  # characters of a line's own id that its name shows


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Token ids up to where the answer starts; `answer` is the right one, where it is known.

    `asked` is what `ids_of` made the ids of (see `asked_prompts`), and `follow_ups` are what the user says next.
    `conversation` and `conversation_sha256` are the name and the ids of its first turn, '' for a prompt asked alone.
    `format` is that of its line, '' for a sample of a store. Names are unique in an exam.
    """

    ids: list[int]
    name: str
    task: str = ""
    answer: str | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    follow_ups: tuple[str, ...] = ()
    conversation: str = ""
    conversation_sha256: str = ""
    format: str = ""

    def answered(self, cycles: tuple[Cycle, ...]) -> AnswerCycles:
        """The cycles of the target's answer to this prompt, under its name."""
        return AnswerCycles(
            cycles,
            self.task,
            name=self.name,
            conversation=self.conversation,
            prompt_sha256=self.conversation_sha256 or ids_sha256(self.ids),
        )


def ids_sha256(ids: Sequence[int] | np.ndarray) -> str:
    """First 16 hex digits of the sha256 of token ids as little-endian int64: two prompts of one name are told apart."""
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()[:16]


class Line(Protocol):
    """One line of a prompts file: its value, or the reason why it has none."""

    @property
    def source(self) -> Path: ...

    @property
    def number(self) -> int: ...

    @property
    def value(self) -> dict[str, Any] | None: ...

    @property
    def fault(self) -> Exception | None: ...


IdsOf = Callable[[Any], list[int]]
ReadLines = Callable[[str], Iterable[Line]]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of an exam, and what was left out as (name of the line or sample, reason)."""

    prompts: list[Prompt]
    left_out: list[tuple[str, str]]

    @property
    def formats(self) -> Counter[str]:
        """Prompts by the format of their lines; the turns of a conversation are one."""
        firsts = (prompt for prompt in self.prompts if prompt.conversation in ("", prompt.name))
        return Counter(prompt.format for prompt in firsts if prompt.format)


def opened_lines(given: str, read_lines: ReadLines) -> Iterator[Line]:
    """The lines of a prompts file, or of the packaged set. Raises UserError at once where there is none."""
    lines = iter(read_lines(str(PACKAGED) if given == STANDARD else given))
    first = next(lines, None)
    if first is None:
        raise no_prompt(given, "it is empty")
    return chain([first], lines)


def no_prompt(path: str, reason: str) -> UserError:
    return UserError(
        f"prompts file {path!r} holds no prompt: {reason}".replace("\n", " "),
        "lines that ask something, like {'prompt': TEXT}, or those of a public benchmark",
        "mend the file, or leave --prompts out to take the store's held-out prompts",
    )


def asked_prompts(lines: Iterable[Line], ids_of: IdsOf, limit: int | None, given: str = "") -> Prompts:
    """The first turns of the first `limit` lines that ask something.

    They are named by their files, those of a folder `given` by their paths in it: one name may occur in two folders.
    `ids_of` gives the token ids that the value of a line asks, read as `prepare` reads lines; it raises ValueError
    where that is nothing. What the lines of benchmarks ask is said by `formats`.
    """
    found = Prompts([], [])
    for line in lines:
        if limit is not None and len(found.prompts) >= limit:
            break
        name = f"{file_name(line.source, given)}:{line.number}"
        try:
            if line.value is None:
                raise ValueError(": ".join(map(str, line.fault.args)) if line.fault else "nothing")
            question = question_of(line.value, line.source.name.split(".")[0])
            found.prompts.append(first_turn(question, name, ids_of))
        except ValueError as error:
            found.left_out.append((name, str(error)))
    return found


def file_name(source: Path, given: str) -> str:
    """What a file's prompts are named by."""
    is_inside = bool(given) and source.is_relative_to(given) and source != Path(given)
    return source.relative_to(given).as_posix() if is_inside else source.name


def first_turn(question: Question, name: str, ids_of: IdsOf) -> Prompt:
    """The prompt of a question; raises ValueError where it asks nothing."""
    ids = ids_of(question.asked)
    name = name if question.label is None else f"{name} (id {shown(question.label)})"
    return Prompt(
        ids=ids,
        name=name,
        task=question.task,
        answer=question.answer,
        asked=question.asked,
        follow_ups=question.follow_ups,
        conversation=name if question.follow_ups else "",
        conversation_sha256=ids_sha256(ids) if question.follow_ups else "",
        format=question.format,
    )


def shown(label: str) -> str:
    """A label on one line, cut where it is long; the file and the line tell prompts apart without it."""
    line = one_line(label)
    return line if len(line) <= LABEL_LENGTH else f"{line[: LABEL_LENGTH - 3]}..."


def next_turn(prompt: Prompt, said: str, number: int, ids_of: IdsOf) -> Prompt:
    """Turn `number` of a conversation, after what the target said.

    Raises ValueError where the template has no form for it, and where the turn is blank.
    """
    if not prompt.follow_ups[0].strip():
        raise ValueError(f"the turn is {prompt.follow_ups[0]!r}, not a text")
    chat = [*prompt.asked["messages"], {"role": "assistant", "content": said}, user(prompt.follow_ups[0])]
    asked = {**prompt.asked, "messages": chat}
    name = turn_name(prompt.conversation, number)
    return replace(prompt, ids=ids_of(asked), name=name, asked=asked, follow_ups=prompt.follow_ups[1:])


def turn_name(conversation: str, number: int) -> str:
    """The name of an answer of a conversation: the first has the conversation's own."""
    return conversation if number == 1 else f"{conversation}, answer {number}"


def sample_name(reader: StoreReader, row: int) -> str:
    """The name of a store's sample, by its reader number."""
    return f"sample {reader.samples.sample_id[row]}"


def recorded_prompts(reader: StoreReader, rows: Iterable[int], *, limit: int | None) -> Prompts:
    """The tokens of a store's samples (reader numbers) before their first supervised token."""
    found = Prompts([], [])
    for i in map(int, rows):
        if limit is not None and len(found.prompts) >= limit:
            break
        name = sample_name(reader, i)
        ids, loss_mask = reader.tokens(i)
        first = int(np.argmax(loss_mask)) if loss_mask.any() else 0
        if first == 0:
            found.left_out.append((name, "no token before the first supervised one"))
        else:
            found.prompts.append(Prompt(ids=ids[:first].tolist(), name=name, task=str(reader.samples.task[i])))
    return found
