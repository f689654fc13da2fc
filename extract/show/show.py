"""Samples for a person to look at, before a week of GPU time is spent on them: as text for a terminal.

What is trained on has a coloured ground, or stands between brackets where there is no colour. Nothing that a
sample holds reaches the terminal as a control character.
"""

import os
import re
import sys
from pathlib import Path

from ...settings_text import as_lines
from .samples import Shown, ShownSample, open_shown
from .tokens import LINE_END, TAB, Piece, Run, ends_of, runs_of, text_of

MOST_RUN_TOKENS = 400  # of neighbouring tokens that are all trained on, or all not; the middle of more is left out
PAIRS = (("[[", "]]"), ("{{", "}}"), ("<<", ">>"), ("\u27e6", "\u27e7"))
RESET = "\x1b[0m"
STYLES = {  # (trained on, mark): black on green for what is trained on, marks underlined
    (False, False): "",
    (False, True): "\x1b[4;36m",
    (True, False): "\x1b[30;42m",
    (True, True): "\x1b[4;30;42m",
}
LEGEND = f"{LINE_END} is a line end, {TAB} a tab, <0xF0> a byte of half a character, <U+202E> another unseen character"


def show(folder: Path, count: int, *, colour: bool | None = None) -> str:
    """`count` samples of a complete DATA folder, or all of a smaller one, as text without a last line end.

    `colour` None: where stdout is a terminal, and NO_COLOR is not set (no-color.org). Raises UserError for a folder
    that is not complete, and for a target that is not there or has another tokenizer now.
    """
    in_colour = colour
    if in_colour is None:
        in_colour = sys.stdout.isatty() and os.environ.get("NO_COLOR", "") == ""
    shown = open_shown(folder, count)
    key = f"{STYLES[True, False]}on this ground{RESET}" if in_colour else f"between {' and '.join(PAIRS[0])}"
    parts = [f"{shown.title}; what is trained on stands {key}", LEGEND]
    parts += [sample_text(shown, sample, number, in_colour) for number, sample in enumerate(shown.samples(), start=1)]
    return "\n".join(parts)


def sample_text(shown: Shown, sample: ShownSample, number: int, colour: bool) -> str:
    """One sample: a line that begins it, its facts, its text."""
    facts = shown.facts(sample)
    runs = runs_of(sample.pieces)
    if colour:
        body = "".join(map(coloured, runs))
    else:
        opening, closing = brackets(runs)
        body = "".join(bracketed(run, opening, closing) for run in runs)
        if (opening, closing) != PAIRS[0]:
            own = " or ".join(PAIRS[0])
            facts["marked"] = f"between {opening} and {closing}: {own} could be taken for the sample's own text here"
    head = f"sample {number} of {len(shown.rows)}: row {sample.row:,} "
    return f"\n{head:-<100}\n{as_lines(facts)}\n\n{body.removesuffix(chr(10))}"


def brackets(runs: list[Run]) -> tuple[str, str]:
    """What to mark with: the first of PAIRS that the text holds nowhere and has no part of where a mark will stand."""
    texts = [text_of(run.pieces) for run in runs]
    whole, edges = "".join(texts), {char for text in texts for char in (text[:1], text[-1:])}
    for opening, closing in PAIRS:
        if opening not in whole and closing not in whole and not edges & {opening[0], closing[0]}:
            return opening, closing
    opening, closing = PAIRS[-1]
    most = max((len(found) for found in re.findall(f"{opening}+|{closing}+", whole)), default=0)
    return opening * (most + 1), closing * (most + 1)


def bracketed(run: Run, opening: str, closing: str) -> str:
    head, left_out, tail = ends_of(run, MOST_RUN_TOKENS)
    text = text_of(head) + (middle(run, left_out) + text_of(tail) if left_out else "")
    if not run.is_trained:
        return text
    line_end = "\n" if text.endswith("\n") else ""  # its sign stays inside the brackets
    return f"{opening}{text.removesuffix(line_end)}{closing}{line_end}"


def coloured(run: Run) -> str:
    head, left_out, tail = ends_of(run, MOST_RUN_TOKENS)
    return painted(head) + (middle(run, left_out) + painted(tail) if left_out else "")


def painted(pieces: tuple[Piece, ...]) -> str:
    """The pieces in their colours, which end with each line: a ground would fill the rest of it."""
    parts: list[tuple[str, str]] = []
    for number, piece in enumerate(pieces):
        style = STYLES[piece.is_trained, piece.is_mark]
        text = piece.text if number else text_of([piece])
        if parts and parts[-1][0] == style:
            parts[-1] = (style, parts[-1][1] + text)
        else:
            parts.append((style, text))
    return "".join(
        "\n".join(f"{style}{line}{RESET}" if style and line else line for line in text.split("\n"))
        for style, text in parts
    )


def middle(run: Run, left_out: int) -> str:
    trained = "all trained on" if run.is_trained else "none trained on"
    return f"\n... {left_out:,} tokens, {trained}, are not shown ...\n"
