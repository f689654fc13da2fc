"""`dflash prepare`: from the user's files to samples, with a count for every line left out.

Input lines = lines that gave at least one sample + lines left out, each named with its reason
in left-out.jsonl. Lines are told apart by their place in their file, never by an id.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import UserError
from ..store.samples import SampleTable, SampleWriter
from .collect import Collector, chosen_device
from .config import PrepareConfig
from .counts import Counts, PrepareReport
from .data import LEFT_OUT_NAME, Data, filled_aside, find_data, require_same_facts, write_data
from .inputs import check_formats, find_sources, short_names, source_sha256
from .shapes import short
from .targets.facts import TextSide, read_facts, read_text_side

FORMAT_VERSION = 1


def prepare(config: PrepareConfig, inputs: Sequence[str]) -> PrepareReport:
    """Fills the folder `config.out`, or finds it filled by the same settings and inputs.

    Raises UserError for a missing input, an unknown target, a folder with other settings, and
    inputs that give no sample; nothing is left behind then.
    """
    sources = find_sources(inputs)
    side = read_text_side(config.target)
    check_formats(sources)
    folder = Path(config.out)
    facts = identity(config, side, sources)
    if there := find_data(folder):
        require_same_facts(folder, there.facts, facts)
        return PrepareReport(folder, there.facts, there.report, is_new=False)
    counts = Counts(sources=dict.fromkeys(short_names(sources), 0))
    with filled_aside(folder) as aside:
        with SampleWriter(aside) as writer, (aside / LEFT_OUT_NAME).open("w", encoding="utf-8") as left_out:
            Collector(config, side, facts["longest"], counts, writer, left_out).run(sources)
        require_samples(counts, sources)
        report = counts.as_plain()
        write_data(aside, Data(facts, report, SampleTable(aside).fingerprint()))
    return PrepareReport(folder, facts, report, is_new=True)


def identity(config: PrepareConfig, side: TextSide, sources: Sequence[Path]) -> dict[str, Any]:
    """Everything that decides the samples; a rerun must find the same facts. Contents, not times.

    `longest` is max_length, or what the target's positions allow when that is less.
    """
    responses: dict[str, Any] = {"origin": config.responses}
    if config.responses == "target":
        target = read_facts(config.target, config.dtype, chosen_device(config.device))
        responses |= {
            "decoding": "greedy",
            "max_new_tokens": config.max_new_tokens,
            "dtype": target.dtype,
            "weights_sha256": target.weights_sha256,
        }
    return {
        "format": FORMAT_VERSION,
        "target": side.name,
        "tokenizer_sha256": side.tokenizer_sha256,
        "template_sha256": side.template_sha256,
        "template_options": dict(config.template),
        "responses": responses,
        "max_length": config.max_length,
        "longest": min(config.max_length, side.max_positions),
        "min_anchors": config.min_anchors,
        "held_out": config.held_out,
        "limit": config.limit,
        "sources": [{"name": name, "sha256": source_sha256(path)} for name, path in zip(short_names(sources), sources)],
    }


def require_samples(counts: Counts, sources: Sequence[Path]) -> None:
    if counts.samples:
        return
    names = ", ".join(str(path) for path in sources)
    if not counts.lines_in:
        raise UserError(f"{short(names)} holds no input line", "at least one line", "check the file")
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.left_out.most_common(4))
    raise UserError(
        f"none of {counts.lines_in} input lines gives a sample: {reasons}; the first: {counts.first_left_out}",
        "lines with an answer that the target's template renders",
        "give lines with answers, or let the target answer with --responses target",
    )
