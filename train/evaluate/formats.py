"""What a line of a prompts file asks: which public benchmark it is of, by its keys, and how its question is put.

Knows keys and texts; knows no file, no template and no target. Answers and tests of benchmarks are not read: nothing
here is graded. What is no benchmark's line is handed on as it is, and means what `prepare` reads in it.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..value_rules import is_number

CHAT, ALPACA = "chat", "alpaca"
CHAT_KEYS = ("messages", "conversations", "conversation", "prompt", "instruction")
"""Keys with which `prepare` reads a chat."""
BESIDE = ("system", "system_prompt", "tools", "functions", "chat_template_kwargs")
"""Keys that mean for a benchmark's line what they mean for a chat."""
LABELS = ("id", "task_id", "question_id", "unique_id", "prompt_id", "Record ID", "ID")
REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FINISH = "Complete the following Python function. It has to pass its tests.\n"
PROGRAM = "Write a Python program that solves the following problem.\n\n"
STARTER = "\n\nStart from this code:\n"
CHOICE = "\n\nThink step by step. End your answer with one line 'Answer: X', where X is the letter of your choice."

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """Lines of one benchmark: the keys they have, those they have not, and what is asked, turn by turn.

    `task` is what their prompts are called without a word in the line; '' for formats that many data sets share.
    """

    name: str
    keys: tuple[str, ...]
    turns: Callable[[Line], list[str]]
    task: str = ""
    without: tuple[str, ...] = ()
    holds: Callable[[Line], bool] = lambda line: True

    def fits(self, line: Line) -> bool:
        return all(key in line for key in self.keys) and not any(k in line for k in self.without) and self.holds(line)


def text_of(line: Line, key: str) -> str:
    """A text that is not blank. Raises ValueError."""
    text = line[key]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"'{key}' is {text!r:.60}, not a text")
    return text


def turns_of(line: Line, key: str) -> list[str]:
    """A list of texts, the first not blank; later ones may be (None is ''), and are left out when they are asked.

    Raises ValueError.
    """
    turns = line[key]
    if not isinstance(turns, list) or not all(text is None or isinstance(text, str) for text in turns):
        raise ValueError(f"'{key}' is {turns!r:.60}, not a list of texts")
    if not turns or not (turns[0] or "").strip():
        raise ValueError(f"'{key}' is {turns!r:.60}, and begins with no text")
    return [text or "" for text in turns]


def put(key: str, before: str = "", after: str = "") -> Callable[[Line], list[str]]:
    """The text under a key between two others."""
    return lambda line: [before + text_of(line, key) + after]


def program_of(line: Line) -> list[str]:
    starter = line["starter_code"]
    code = f"{STARTER}```python\n{starter}\n```" if isinstance(starter, str) and starter.strip() else ""
    return [PROGRAM + text_of(line, "question_content") + code]


def tested_program(line: Line) -> list[str]:
    """MBPP: what is to be written, and the tests, which say the name of the function."""
    tests = line["test_list"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"'test_list' is {tests!r:.60}, not a list of texts")
    return [
        text_of(line, "text" if "text" in line else "prompt") + "\nIt has to pass these tests:\n" + "\n".join(tests)
    ]


def choices_of(line: Line) -> list[str]:
    """GPQA: the four answers in an order of their own, which their sha256 under the question gives."""
    question = text_of(line, "Question")
    answers = [text_of(line, key) for key in GPQA[1:]]
    answers.sort(key=lambda answer: hashlib.sha256(f"{question}\n{answer}".encode()).hexdigest())
    lettered = "\n".join(f"{letter}) {answer.strip()}" for letter, answer in zip("ABCD", answers))
    return [f"{question.strip()}\n\n{lettered}{CHOICE}"]


def is_list_of_texts(line: Line) -> bool:
    return isinstance(line["prompt"], list) and all(text is None or isinstance(text, str) for text in line["prompt"])


GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
GIVEN = ("choices", "options", "context", "passage")
"""Keys of what a question cannot be asked without."""

FORMATS = (
    Format(
        "gsm8k",
        ("question", "answer"),
        put("question", after=REASON),
        "gsm8k",
        GIVEN,
        lambda x: "####" in str(x["answer"]),
    ),
    Format(
        "question",
        ("question", "answer"),
        put("question", after=REASON),
        "",
        GIVEN,
        lambda x: "####" not in str(x["answer"]),
    ),
    Format("math-500", ("problem", "answer", "unique_id"), put("problem", after=REASON), "math-500"),
    Format("problem", ("problem", "answer"), put("problem", after=REASON), "", ("unique_id", *GIVEN)),
    Format("problem", ("problem", "solution"), put("problem", after=REASON), "", ("answer", "unique_id", *GIVEN)),
    Format("problem", ("Problem", "Answer"), put("Problem", after=REASON), "", ("problem", *GIVEN)),
    Format(
        "humaneval",
        ("task_id", "prompt", "canonical_solution", "test"),
        put("prompt", f"{FINISH}```python\n", "\n```"),
        "humaneval",
    ),
    Format("mbpp", ("task_id", "text", "test_list"), tested_program, "mbpp"),
    Format("mbpp", ("task_id", "prompt", "test_list"), tested_program, "mbpp", ("text",)),
    Format("mt-bench", ("category", "prompt"), lambda line: turns_of(line, "prompt"), "mt-bench", (), is_list_of_texts),
    Format("turns", ("turns",), lambda line: turns_of(line, "turns")),
    Format("livecodebench", ("question_content", "starter_code"), program_of, "livecodebench"),
    Format("gpqa", GPQA, choices_of, "gpqa"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """What one line asks: `asked` is a line as `prepare` reads it, `follow_ups` what the user says after its answer."""

    format: str
    asked: dict[str, Any]
    follow_ups: tuple[str, ...]
    task: str
    label: str | None
    answer: str | None


def question_of(value: Line, stem: str) -> Question:
    """The question of a line's value; `stem` names its file's prompts where neither line nor format does.

    Raises ValueError for a line that fits two formats, or whose format is broken. Of a line that fits none it is left
    to the reader of `asked` to say so.
    """
    line = {key: item for key, item in value.items() if item is not None}
    found = [one for one in FORMATS if one.fits(line)]
    names = [one.name for one in found]
    if found and any(key in line for key in CHAT_KEYS if key not in found[0].keys):
        names.append(CHAT)
    if len(names) > 1:
        raise ValueError(f"fits {len(names)} formats, {' and '.join(names)}: keys {sorted(line)!r:.200}")
    label = next((str(line[key]) for key in LABELS if key in line), None)
    named = line.get("task", line.get("category"))
    named = None if named is None else one_line(str(named))
    if not found:
        answer = line.get("answer")
        if is_number(answer):
            answer = str(answer)
        if answer is not None and not isinstance(answer, str):
            raise ValueError(f"'answer' is a {type(answer).__name__}, neither a text nor a number")
        is_alpaca = [key for key in (*CHAT_KEYS, "input") if key in line] == ["instruction", "input"]
        name, task = (ALPACA, ALPACA) if is_alpaca else (CHAT, stem)
        return Question(name, dict(line), (), task if named is None else named, label, answer)
    turns = found[0].turns(line)
    asked = {key: line[key] for key in BESIDE if key in line} | {"messages": [user(turns[0])]}
    task = named if named is not None else found[0].task or stem
    return Question(found[0].name, asked, tuple(turns[1:]), task, label, None)


def one_line(text: str) -> str:
    """A text of a user's file as it is shown: on one line, without letters that move a cursor or hide others."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
