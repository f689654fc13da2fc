"""The instruction corpus behind the tiny target: eight kinds of prompt, each with one right answer.

Every prompt and answer is made by the code below from small word lists, so the corpus
needs no download and no licence, never runs out, and lets the demo check the target's
answers exactly. A prompt is held out or not by a hash of its text alone; training data
and exam prompts can therefore never meet.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = (
    "Anna Ben Carla David Emma Felix Greta Hugo Ines Jonas Klara Leo Mara Nils Olga "
    "Paul Quinn Rosa Sven Tara Uwe Vera Xenia Yara Zoe Adam Bella Cora Dora Emil"
).split()
CITIES = (
    "Oslo Paris Rome Lima Cairo Delhi Tokyo Quito Accra Dublin Vienna Madrid Lisbon "
    "Prague Warsaw Athens Berlin Zurich Milan Turin Porto Ghent Basel Bern"
).split()
THINGS = (
    "book lamp chair table apple bread pencil bottle window garden basket ladder "
    "hammer candle mirror blanket carpet ticket button jacket guitar rocket bucket camera"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MEALS = "lunch dinner breakfast coffee tea supper".split()
OPERATIONS = (
    ("add", "+", "sum"),
    ("subtract", "-", "difference"),
    ("multiply", "*", "product"),
    ("divide", "/", "quotient"),
)
VARIABLES = "a b c d x y z n m k left right first second".split()
HELD_OUT_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt of a kind with its only right answer."""

    kind: str
    prompt: str
    answer: str


def is_held_out(prompt: str) -> bool:
    """True for the eighth of all prompts that no training ever sees (sha256 of the text)."""
    first = hashlib.sha256(prompt.encode()).digest()[0]
    return first < 256 * HELD_OUT_SHARE


def tasks(seed: int, *, held_out: bool) -> Iterator[Task]:
    """Endless tasks from one side of the split, the same ones for the same seed."""
    chooser = random.Random(f"{seed}-{held_out}")
    while True:
        task = chooser.choice(KINDS)(chooser)
        if is_held_out(task.prompt) == held_out:
            yield task


def distinct_tasks(count: int, seed: int, *, held_out: bool) -> list[Task]:
    """The first `count` tasks with prompts that differ from each other."""
    found: dict[str, Task] = {}
    for task in tasks(seed, held_out=held_out):
        found.setdefault(task.prompt, task)
        if len(found) == count:
            break
    return list(found.values())


def count_up(r: random.Random) -> Task:
    first, count = r.randrange(0, 800), r.randrange(4, 13)
    lines = [f"{i}. {first + i - 1}" for i in range(1, count + 1)]
    return Task("count", f"Count {count} numbers from {first}.", "\n".join(lines))


def multiples(r: random.Random) -> Task:
    n, count = r.randrange(2, 40), r.randrange(5, 11)
    lines = [f"{n} x {i} = {n * i}" for i in range(1, count + 1)]
    return Task("multiples", f"Write the first {count} multiples of {n}.", "\n".join(lines))


def json_record(r: random.Random) -> Task:
    name, city, thing, age = r.choice(NAMES), r.choice(CITIES), r.choice(THINGS), r.randrange(18, 90)
    answer = f'{{\n  "name": "{name}",\n  "age": {age},\n  "city": "{city}",\n  "wants": "{thing}"\n}}'
    return Task("json", f"As JSON: {name}, {age}, from {city}, wants a {thing}.", answer)


def invitation(r: random.Random) -> Task:
    guest, host = r.sample(NAMES, 2)
    meal, day, city = r.choice(MEALS), r.choice(DAYS), r.choice(CITIES)
    answer = (
        f"Dear {guest},\n\nI would like to invite you to {meal} in {city} on {day}. "
        f"Please let me know before {day} if you can come.\n\nKind regards,\n{host}"
    )
    return Task("invitation", f"Invite {guest} to {meal} on {day} in {city}. Sign as {host}.", answer)


def function(r: random.Random) -> Task:
    verb, sign, noun = r.choice(OPERATIONS)
    a, b = r.sample(VARIABLES, 2)
    answer = f'def {verb}({a}, {b}):\n    """Return the {noun} of {a} and {b}."""\n    return {a} {sign} {b}'
    return Task("function", f"Write a function to {verb} {a} and {b}.", answer)


def numbered_list(r: random.Random) -> Task:
    thing, count = r.choice(THINGS), r.randrange(3, 13)
    lines = [f"{i}. {thing}" for i in range(1, count + 1)]
    return Task("list", f"List {thing} {count} times.", "\n".join(lines))


def shopping(r: random.Random) -> Task:
    things, name = r.sample(THINGS, r.randrange(3, 7)), r.choice(NAMES)
    answer = f"{name} buys {len(things)} things:\n" + "\n".join(f"- one {thing}" for thing in things)
    return Task("shopping", f"{name} buys: {', '.join(things)}.", answer)


def thanks(r: random.Random) -> Task:
    thing = r.choice(THINGS)
    name = r.choice(NAMES)
    answer = f"Dear {name},\n\nthank you for the {thing}. I will use the {thing} every day.\n\nYours"
    return Task("thanks", f"Thank {name} for the {thing}.", answer)


KINDS: tuple[Callable[[random.Random], Task], ...] = (
    count_up,
    multiples,
    json_record,
    invitation,
    function,
    numbered_list,
    shopping,
    thanks,
)
