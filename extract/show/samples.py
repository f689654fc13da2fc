"""Which samples of a DATA folder are shown, and what is said of each beside its text.

Knows the folder and its target's tokenizer; knows no terminal and no HTML.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import UserError
from ...store.samples import SampleTable, eligible_anchors, recorded_length
from ...store.tokens_file import TEXT_COLUMNS
from ..data import Data, read_data
from ..targets.facts import TextSide, read_text_side
from .tokens import Piece, Run, Spelling, one_line, runs_of, text_of, visible

MOST_ANSWERS = 8
MOST_TAIL = 6
CONTEXT_PIECES = 12
CONTEXT_CHARS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSample:
    """One sample, its tokens spelled."""

    row: int
    source: str
    source_line: int
    split: str
    task: str
    origin: str
    pieces: list[Piece]
    num_tokens: int
    num_trained: int
    num_anchors: int
    num_recorded: int
    """Tokens up to the last anchor; no state is recorded after them."""

    @property
    def answers(self) -> list[Run]:
        return [run for run in runs_of(self.pieces) if run.is_trained]


@dataclass(frozen=True, slots=True)
class Shown:
    """What is to be shown of a folder: its facts, its target's tokenizer, and the rows."""

    folder: Path
    data: Data
    side: TextSide
    table: SampleTable
    rows: list[int]

    def samples(self) -> Iterator[ShownSample]:
        spelling = Spelling(self.side.tokenizer)
        columns = {name: self.table.codes(name) for name in TEXT_COLUMNS}
        lines = self.table.column("source_line")
        for row in self.rows:
            ids, mask = self.table.tokens(row)
            texts = {name: visible_line(names[codes[row]]) for name, (codes, names) in columns.items()}
            yield ShownSample(
                row=row,
                **texts,
                source_line=int(lines[row]),
                pieces=spelling.pieces(ids, mask),
                num_tokens=len(ids),
                num_trained=int(mask.sum()),
                num_anchors=int(eligible_anchors(mask).sum()),
                num_recorded=recorded_length(mask),
            )

    @property
    def title(self) -> str:
        spread = ", spread over it" if len(self.rows) < len(self.table) else ""
        name = visible_line(str(self.folder))
        return f"{len(self.rows):,} of the {len(self.table):,} samples of {name}{spread}"

    def facts(self, sample: ShownSample) -> dict[str, str]:
        """What is said of a sample, each under its name: where it is from, what is trained on, what is cut."""
        answers = sample.answers
        share = sample.num_trained / sample.num_tokens
        allowed = int(self.data.facts["longest"])
        full = "; the longest length allowed, so it may have been cut there" if sample.num_tokens >= allowed else ""
        plural = "" if len(answers) == 1 else "s"
        named = [answer_line(sample.pieces, run, self.side.eos_ids) for run in answers[:MOST_ANSWERS]]
        if more := len(answers) - len(named):
            named.append(f"and {more:,} more")
        return {
            "from": f"line {sample.source_line:,} of {sample.source}; split {sample.split}, task "
            f"{sample.task or '(none)'}, answers from {sample.origin}",
            "tokens": f"{sample.num_tokens:,}, {sample.num_trained:,} trained on ({share:.0%}) in {len(answers):,} "
            f"answer{plural}, {sample.num_anchors:,} anchors{full}",
            "recorded": recorded_line(sample),
            **{f"answer {i}" if i <= MOST_ANSWERS else "answers": line for i, line in enumerate(named, start=1)},
        }


def open_shown(folder: Path, count: int) -> Shown:
    """Chooses `count` samples of a complete folder, or all of a smaller one.

    Raises UserError for a folder that is not complete, a target that is not there, and one whose tokenizer is no
    longer the one that the samples were made with: the text shown would not be theirs.
    """
    data = read_data(folder)
    side = read_text_side(data.facts["target"])
    if side.tokenizer_sha256 != data.facts["tokenizer_sha256"]:
        raise UserError(
            f"{str(folder)!r} was prepared with the tokenizer {data.facts['tokenizer_sha256'][:12]}, "
            f"target {side.name!r} has {side.tokenizer_sha256[:12]} now",
            "the same tokenizer, or the samples read as something else",
            "bring the target's earlier tokenizer files back, or prepare the data again",
        )
    table = SampleTable(folder)
    return Shown(folder, data, side, table, chosen_rows(table.codes("split")[0], count))


def chosen_rows(splits: np.ndarray, count: int) -> list[int]:
    """Rows in order, spread evenly over each split: splits [N] are codes, the number is min(count, N).

    Each split has its share, and at least one row where there are enough; the same every time.
    """
    count = min(count, len(splits))
    sizes = np.bincount(splits).tolist()
    quotas = [min(size, max(1, size * count // max(1, len(splits)))) for size in sizes]
    while sum(quotas) < count:
        quotas[max(range(len(sizes)), key=lambda i: sizes[i] - quotas[i])] += 1
    while sum(quotas) > count:
        quotas[max(range(len(sizes)), key=lambda i: (quotas[i], -sizes[i]))] -= 1
    chosen: list[int] = []
    for split, quota in enumerate(quotas):
        rows = np.flatnonzero(splits == split)
        chosen += [int(rows[(2 * i + 1) * len(rows) // (2 * quota)]) for i in range(quota)]
    return sorted(chosen)


def visible_line(text: str) -> str:
    return one_line(visible(text))


def quoted(pieces: list[Piece]) -> str:
    return f'"{one_line(text_of(pieces))}"'


def answer_line(pieces: list[Piece], run: Run, eos_ids: tuple[int, ...]) -> str:
    """Where an answer begins and ends, after which text, and whether an end mark is trained on."""
    first, last = run.first, run.first + run.num_tokens - 1
    place = pieces.index(run.pieces[0])
    after = f"after {context(pieces[:place])}" if place else "from the first token on"
    end, rest = run.pieces[-1], pieces[place + len(run.pieces) :]
    if end.ids[-1] in eos_ids:
        ending = f"ends with {quoted([end])}, an end mark"
    elif not rest:
        ending = f"ends with {quoted([end])}, the sample's last token and no end mark"
    elif rest[0].ids[0] in eos_ids:
        ending = f"ends with {quoted([end])}; the end mark {quoted(rest[:1])} that follows is NOT trained on"
    else:
        ending = f"ends with {quoted([end])}, no end mark; {quoted(rest[:1])} follows"
    return f"tokens {first:,}-{last:,} ({run.num_tokens:,}), {after}, {ending}"


def context(before: list[Piece]) -> str:
    """The end of what stands before an answer, as far as it fits."""
    kept = before[-CONTEXT_PIECES:]
    while len(kept) > 1 and len(quoted(kept)) > CONTEXT_CHARS:
        kept = kept[1:]
    return quoted(kept)


def recorded_line(sample: ShownSample) -> str:
    """Which tokens at the end no state is recorded of."""
    rest = [piece for piece in sample.pieces if piece.first >= sample.num_recorded]
    count = sample.num_tokens - sample.num_recorded
    if not sample.num_recorded:
        return "nothing: no token that is trained on has another after it, so there is no anchor"
    named = quoted(rest) if len(rest) <= MOST_TAIL else f"{quoted(rest[:MOST_TAIL])} and so on"
    return f"the first {sample.num_recorded:,}, up to the last anchor; not the last {count:,}: {named}"
