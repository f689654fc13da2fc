"""The prompts of the SmolLM2 benchmark, made from word lists of our own; nothing is downloaded.

Held-out prompts are others, of the same kinds: a prompt's side is decided by a hash of its text, as in `tasks.py`.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_offline.extract.targets.tasks import CITIES, NAMES, THINGS, is_held_out

DRAWS_PER_PROMPT = 50
WORDS: dict[str, Sequence[Any]] = {
    "n": range(3, 11),
    "few": range(2, 6),
    "big": range(12, 97),
    "price": range(2, 30),
    "name": NAMES,
    "friend": "a sister, a neighbour, a friend, a brother, an uncle, a cousin".split(", "),
    "city": CITIES,
    "thing": THINGS,
    "concept": "gravity, photosynthesis, inflation, electricity, evolution, friction, the water cycle, magnetism, "
    "a budget, compound interest, the internet, recursion, a database, machine learning, plate tectonics, democracy, "
    "a vaccine, an ecosystem, sound waves, the moon's phases, supply and demand, insurance, a rainbow, fermentation, "
    "the immune system, a loop in programming, encryption, probability, the seasons, a volcano".split(", "),
    "audience": "to a child, to a teenager, to my grandmother, to a new student, in one paragraph, in two sentences, "
    "with a simple example, with an everyday comparison, step by step, in plain words, for a school report, "
    "to someone in a hurry".split(", "),
    "hero": "a shy robot, an old sailor, a clever fox, a young painter, a lost dog, a tired baker, a brave mouse, "
    "a retired teacher, a curious cat, a lonely lighthouse keeper, a small dragon, a violin player".split(", "),
    "event": "finds a secret door, learns to swim, makes a new friend, loses a key, wins a race, plants a garden, "
    "misses the last train, discovers an old map, builds a boat, forgets a birthday, hears a strange song, "
    "helps a stranger".split(", "),
    "topic": "the sea, autumn leaves, a quiet morning, friendship, the first snow, a busy street, the night sky, "
    "an old house, rain, spring flowers, a long journey, my grandmother's kitchen, the wind, a small village, "
    "hope, music".split(", "),
    "mood": "happy, sad, funny, calm, hopeful, mysterious, gentle, playful, serious, dreamy".split(", "),
    "person": "my boss, a customer, my landlord, a colleague, the school, my neighbour, the library, a hotel, "
    "the dentist, my team, a supplier, an old friend".split(", "),
    "matter": "a late delivery, a meeting on Friday, a broken heater, a change of address, a day off, a lost parcel, "
    "a thank-you, a missed appointment, a price request, an invitation to dinner, a new project, an apology".split(
        ", "
    ),
    "item": "healthy snacks, indoor games, ways to save money, ideas for a birthday, questions for an interview, "
    "things to pack, ways to relax, good habits, topics for a talk, gifts, outdoor activities, ways to learn words, "
    "rules for a shared flat, names for a shop".split(", "),
    "purpose": "a family, a student, a rainy weekend, a long flight, a small office, a beginner, an older person, "
    "a summer holiday, a classroom, a group of friends, a busy parent, a camping trip".split(", "),
    "action": "adds up all numbers in, finds the largest value in, counts the even numbers in, reverses, "
    "removes duplicates from, returns the average of, sorts, checks for negative numbers in, doubles every value in, "
    "returns the last element of, counts the items in, prints every item of".split(", "),
    "argument": "values numbers items data scores prices ages points lengths weights heights days totals".split(),
    "style": "with a docstring, without using built-in helpers, with type hints, and show how to call it, "
    "and handle an empty list, with comments, and keep it short, and return None if it is empty".split(", "),
    "place": "museum, library, bakery, market, theatre, school, station, swimming pool, bookshop, park".split(", "),
    "change": "opened in spring, closed for repairs, moved to a new building, doubled in size, hired two people, "
    "lowered its prices, won a local prize, changed its opening hours".split(", "),
    "effect": "more visitors come every week, the neighbours are pleased, many people were surprised, "
    "the street is busier than before, families now come on Sundays, the mayor gave a speech".split(", "),
    "tone": "politely, formally, in a friendly way, more briefly, in the past tense, as a question, in simpler words, "
    "with more warmth".split(", "),
    "sentence": "Send me the {thing} by Monday. | I do not like the {thing} you gave me. | The {thing} costs too much. "
    "| We cannot repair the {thing} this week. | You forgot to bring the {thing}. | The {thing} is broken again. "
    "| {name} must pay for the {thing}. | {name} is late for the meeting in {city}.".split(" | "),
    "chore": "clean a window, boil an egg, remove a coffee stain, water house plants, fold a shirt, fix a flat tyre, "
    "sleep better, learn to cook, store fresh bread, keep a room cool, make new friends, write a good letter, "
    "train a puppy, paint a wall, save electricity, prepare for an exam".split(", "),
    "limit": "without spending money, in ten minutes, in a small flat, with two children, as a beginner, in winter, "
    "before guests arrive, on a small budget, when I am tired, without special tools, on my own, every day".split(", "),
    "fruit": "apples oranges pears lemons plums peaches bananas eggs rolls cookies".split(),
    "job": "teacher nurse baker driver farmer painter lawyer cook student gardener".split(),
    "dish": "soup, salad, omelette, pancakes, pasta, curry, stew, sandwich, rice bowl, cake, pie, smoothie".split(", "),
    "food": "tomatoes, potatoes, spinach, mushrooms, chicken, lentils, cheese, carrots, beans, apples, rice, eggs, "
    "onions, walnuts, peppers".split(", "),
    "extra": "garlic, basil, lemon, honey, ginger, cream, butter, mint, olive oil, cinnamon".split(", "),
    "choice": "living in a big city, working from home, owning a dog, buying a used car, studying abroad, "
    "riding a bicycle to work, renting a flat, reading e-books, shopping online, growing vegetables, having a garden, "
    "learning the piano, starting a company, travelling by train".split(", "),
    "pair": "a lake and a river, coffee and tea, a frog and a toad, a city and a village, a novel and a poem, "
    "a comet and an asteroid, butter and cheese, jam and honey, a violin and a guitar, a hill and a mountain, "
    "a list and a tuple, fog and a cloud, weather and climate, a loan and a gift, a bus and a tram, a virus and "
    "a bacterium, speed and acceleration, a fruit and a vegetable, a mammal and a reptile, an opinion and a fact, "
    "RAM and a hard disk, a state and a nation, a planet and a star, mass and weight, heat and temperature".split(", "),
    "goal": "read more books, run five kilometres, learn basic Spanish, tidy the house, eat more vegetables, "
    "sleep earlier, write a short story, save for a holiday, learn to draw, spend less time online".split(", "),
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "explain": ("Explain {concept} {audience}.", "What is {concept}? Explain it {audience}, with {few} main points."),
    "story": ("Write a short story about {hero} who {event} in {city}.", "Tell me a {mood} story: {hero} {event}."),
    "poem": ("Write a {mood} poem of {n} lines about {topic}.", "Write a {mood} poem about {topic} for {name}."),
    "email": ("Write a short e-mail to {person} about {matter}. Sign as {name}.",),
    "list": ("List {n} {item} for {purpose}.", "Give me {n} {item} for {purpose}, one line each."),
    "function": ("Write a Python function that {action} a list called {argument}, {style}.",),
    "summary": (
        "Summarize in one sentence: The {place} in {city} {change}. {name}, who works there, says that {effect}.",
    ),
    "rewrite": ("Rewrite this {tone}: {sentence}",),
    "everyday": ("How can I {chore} {limit}?", "What is the best way to {chore} {limit}? Give {n} tips."),
    "arithmetic": (
        "{name} has {big} {fruit} and gives {few} to {friend}. How many {fruit} are left?",
        "A {thing} costs {price} dollars. How much do {n} of them cost?",
        "{name} buys {n} {fruit} for {price} dollars each. How much does {name} pay?",
    ),
    "json": ("Write a JSON object for {name}, {big} years old, a {job} from {city}, who owns a {thing}.",),
    "recipe": ("Give me a simple recipe for {dish} with {food} and {extra}.", "How do I make {dish} with {food}?"),
    "pros and cons": (
        "What are the pros and cons of {choice} for a {job} in {city}?",
        "Name {few} pros and cons of {choice} for a {job}.",
    ),
    "compare": (
        "What is the difference between {pair}? Explain {audience}.",
        "Name {few} differences between {pair}, {audience}.",
    ),
    "plan": ("Make a plan for {n} days to {goal} {limit}.", "Help {name}, a {job}, to {goal} in {n} days."),
    "dialogue": ("Write a short dialogue between {name} and a {job} about {topic}.",),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a kind."""

    kind: str
    text: str

    def line(self) -> str:
        """The input line of `dflash prepare` and `dflash evaluate`."""
        split = "heldout" if is_held_out(self.text) else "train"
        chat = [{"role": "user", "content": self.text}]
        return json.dumps({"messages": chat, "task": self.kind, "split": split}) + "\n"


def draw(chooser: random.Random) -> Question:
    """Any kind, any template of it, every gap filled with any of its words; a gap that comes twice says the same."""
    kind = chooser.choice(list(TEMPLATES))
    text, words = chooser.choice(TEMPLATES[kind]), dict[str, str]()
    while gap := re.search(r"{(\w+)}", text):  # a word may hold gaps of its own
        name = gap[1]
        words[name] = words.get(name) or str(chooser.choice(WORDS[name]))
        text = text.replace(gap[0], words[name])
    return Question(kind, text)


def questions(count: int, seed: int, *, held_out: bool) -> list[Question]:
    """Distinct prompts from one side of the split, the same ones for the same seed."""
    chooser, found = random.Random(f"{seed}-{held_out}"), dict[str, Question]()
    for _ in range(DRAWS_PER_PROMPT * count):
        if len(found) == count:
            break
        question = draw(chooser)
        if is_held_out(question.text) == held_out:
            found.setdefault(question.text, question)
    if len(found) < count:
        raise SystemExit(f"the word lists gave only {len(found):,} of {count:,} prompts; ask for fewer")
    return list(found.values())
