"""`dflash prepare`: from the user's files to samples, with a count for every line left out.

Input lines = lines that gave at least one sample + lines left out. Each of these, and what of the others was left
out or changed, is named with its reason in rejected.parquet. The same inputs and settings give the same bytes,
whatever the number of processes.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from .. import UserError
from ..progress import bar, say
from ..store.samples import SampleTable, SampleWriter
from ..watch import ChildDied
from .answering import answer, chosen_device
from .chats.templates import ChatTemplate
from .collect import WANTED, Collector, cannot_be_used
from .config import PrepareConfig
from .counts import Counts, PrepareReport
from .data import (
    Data,
    facts_sha256,
    filled_aside,
    find_data,
    require_outside,
    require_same_facts,
    require_whole,
    write_data,
)
from .lengths_table import summary_lines
from .lines.files_found import STDIN, files_passed_over, spelled
from .lines.inputs import Chunk, check_formats, chunks, opened_sources, short_names, sources_facts
from .lines.json_text import short
from .lines.shapes import KEYS
from .lines.token_lines import REASONS
from .pool import num_processes, run_pool
from .rejected import LINE, RejectedWriter, rejected_rows
from .same_target import as_named_before
from .targets.facts import TextSide, read_facts, read_text_side
from .work import OUT_OF_RANGE, Maker

FORMAT_VERSION = 4  # 4: ids of chats are held against the target's embedding, test parts of a dataset are held out
MOST_SOURCES = 32  # named one by one in the metadata of a token file
MOST_FACTS_BYTES = 16_384  # there; a token file takes twice as much


def prepare(config: PrepareConfig, inputs: Sequence[str]) -> PrepareReport:
    """Fills the folder `config.out`, or finds it filled by the same settings and inputs.

    Raises UserError for a missing input, an unknown target, a folder with other settings,
    inputs that give no sample and, where asked, the first bad line; nothing is left behind then.
    """
    with opened_sources(inputs) as sources:
        side = read_text_side(config.target)
        check_formats(sources)
        folder = Path(config.out)
        require_utf8(folder)
        require_outside(folder, [given for given in inputs if given != STDIN])
        there = find_data(folder)
        require_read_by_template(config, side)
        facts = identity(config, side, sources)
        facts["date"] = template_date(config, side, there)
        if there:
            require_same_facts(folder, there.facts, as_named_before(there.facts, facts))
            require_whole(folder, there)
            if side.name != there.facts["target"]:
                say(f"{folder} was prepared for target {there.facts['target']}; all that decides it is the same now")
            if config.strict:
                require_all_used(folder, there)
            return report_of(folder, there, is_new=False)
        counts = Counts(dict.fromkeys(short_names(sources), 0), files_passed_over=files_passed_over(inputs))
        with filled_aside(folder) as aside:
            metadata = samples_metadata(facts)
            with SampleWriter(aside, metadata=metadata) as writer, RejectedWriter(aside) as rejected:
                fill(Maker(config, side, facts["longest"], facts["date"]), sources, (counts, writer, rejected))
            require_samples(counts, sources)
            data = Data(facts, counts.as_plain(), SampleTable(aside).fingerprint())
            write_data(aside, data)
    return report_of(folder, data, is_new=True)


def fill(maker: Maker, sources: Sequence[Path], into: tuple[Counts, SampleWriter, RejectedWriter]) -> None:
    """Runs over every input line. Raises UserError where a process dies."""
    config = maker.config
    asked = config.responses == "target"
    with bar("prepare", " lines", disable=True if asked else None) as shown:
        collector = Collector(config, *into, bar=shown)
        collector.name_sources(sources)
        dealt = limited((chunk for path in sources for chunk in chunks(path, KEYS)), config.limit)
        if asked:
            answer(dealt, maker, collector)
        else:
            try:
                run_pool(dealt, maker, num_processes(config, sources), collector)
            except ChildDied as error:
                raise UserError(
                    str(error),
                    "every process to end by itself",
                    "give the same command again: it starts over, nothing of this run is kept",
                ) from error


def limited(dealt: Iterator[Chunk], limit: int | None) -> Iterator[Chunk]:
    """The chunks up to the line that the limit names."""
    left = limit
    for chunk in dealt:
        if left is not None and chunk.num_lines >= left:
            yield chunk.head(left)
            return
        left = None if left is None else left - chunk.num_lines
        yield chunk


def report_of(folder: Path, data: Data, *, is_new: bool) -> PrepareReport:
    table = SampleTable(folder)
    lengths = summary_lines(
        table.column("num_tokens"),
        table.trained_tokens(),
        data.facts["longest"],
        recorded=table.column("num_recorded"),
    )
    return PrepareReport(folder, data.facts, data.report, is_new, tuple(lengths))


def identity(config: PrepareConfig, side: TextSide, sources: Sequence[Path]) -> dict[str, Any]:
    """Everything that decides the samples; a rerun must find the same facts. Contents, not times.

    `longest` is max_length, or what the target's positions allow when that is less.
    """
    responses: dict[str, Any] = {"origin": config.responses}
    if config.responses == "target":
        target = read_facts(config.target, config.dtype, chosen_device(config.device))
        responses |= {
            "decoding": "greedy",
            "max_new_tokens": config.answer_tokens,
            "dtype": target.dtype,
            "weights_sha256": target.weights_sha256,
        }
    else:
        responses |= {"unless_said": config.origin}
    return {
        "format": FORMAT_VERSION,
        "target": side.name,
        "tokenizer_sha256": side.tokenizer_sha256,
        "template_sha256": side.template_sha256,
        "template_options": dict(config.template),
        "responses": responses,
        "max_length": config.max_length,
        "longest": min(config.max_length, side.max_positions),
        **{name: getattr(config, name) for name in ("long", "min_trained", "turns", "duplicates")},
        **{name: getattr(config, name) for name in ("split", "sample", "limit")},
        "sources": sources_facts(sources),
    }


def require_read_by_template(config: PrepareConfig, side: TextSide) -> None:
    """Raises UserError for a setting of the chat template that the target's does not read, or says that it has none."""
    if config.template and (idle := ChatTemplate(side.tokenizer).idle_options(config.template, side.name)):
        say(idle)
    if config.date is not None and not prints_date(side):
        raise UserError(
            f"date = {config.date!r}, but the chat template of target {side.name!r} prints no date",
            "a date for templates that print one (strftime_now)",
            "drop date",
        )


def require_all_used(folder: Path, there: Data) -> None:
    """What --strict asks, of a folder that is there: raises what the run that filled it would have raised."""
    if set(there.report["left_out"]) <= set(WANTED):
        return
    first = next(row for row in rejected_rows(folder) if row["what"] == LINE and row["reason"] not in WANTED)
    raise cannot_be_used(str(first["source"]), int(first["line"]), str(first["reason"]), str(first["detail"]))


def prints_date(side: TextSide) -> bool:
    return "strftime_now" in str(getattr(side.tokenizer, "chat_template", None))


def template_date(config: PrepareConfig, side: TextSide, there: Data | None) -> str | None:
    """The date that the template prints, None for one that prints none; a folder that is there keeps its own."""
    if not prints_date(side):
        return None
    return config.date or (there.facts.get("date") if there else None) or date.today().isoformat()


def samples_metadata(facts: dict[str, Any]) -> dict[str, str]:
    """What the schema of the token files says: the facts, and the hash of all of them.

    Many sources are one hash there, and so is what makes the facts too long: names, options, a target's path.
    """
    shown = facts if len(facts["sources"]) <= MOST_SOURCES else facts | {"sources": hashed(facts["sources"])}
    for name in ("sources", "template_options", "target"):
        if len(json.dumps(shown)) > MOST_FACTS_BYTES:
            shown = shown | {name: hashed(facts[name])}
    return {"facts": json.dumps(shown), "facts_sha256": facts_sha256(facts)}


def hashed(fact: Any) -> dict[str, Any]:
    return {"count": len(fact), "sha256": hashlib.sha256(json.dumps(fact).encode()).hexdigest()}


def require_utf8(folder: Path) -> None:
    """Raises UserError for a folder that Arrow cannot name."""
    if spelled(str(folder.absolute())) != str(folder.absolute()):
        raise UserError(
            f"the name of {str(folder.absolute())!r} is not UTF-8",
            "a folder whose whole path is UTF-8",
            "choose another --out",
        )


ADVICE = {
    False: (
        "lines with an answer that the target's template renders",
        "give lines with answers, or let the target answer with --responses target",
    ),
    True: (
        "token ids that the target has, and for each by loss_mask, labels or prompt_length whether it is trained on",
        "check --target, whose tokenizer makes the ids, and the rows",
    ),
}
"""What is told where no line gives a sample: of token ids alone, and else."""


def require_samples(counts: Counts, sources: Sequence[Path]) -> None:
    if counts.samples:
        return
    names = ", ".join(str(path) for path in sources)
    if not counts.lines_in:
        raise UserError(f"{short(names)} holds no input line", "at least one line", "check the file")
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.left_out.most_common(4))
    raise UserError(
        f"none of {counts.lines_in} input lines gives a sample: {reasons}; the first: {counts.first_left_out}",
        *ADVICE[all(reason in (OUT_OF_RANGE, *REASONS) for reason in counts.left_out)],
    )
