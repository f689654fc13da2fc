"""`dflash regenerate`: the served target writes the answers of the user's chats.

Input lines = answered + failed + skipped. Each line ends as one record of the journal; the folder is finished from
it when all are there. Typed again after any end, the command goes on with the lines that have none; lines that
failed are done as well, until --retry-failed asks for them.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from ... import UserError
from ...progress import bar, say
from ...store.files import FolderLock, make_folder, storage_error
from ..data import first_difference
from ..lines.inputs import check_formats, chunks, opened_sources, read_lines, short_names, sources_facts
from ..lines.json_text import short
from ..lines.shapes import KEYS
from ..origins import target_origin
from .asking import Asker, Numbered
from .client import Client
from .config import RegenerateConfig
from .endpoints import NoEndpoint
from .finished import Finished, missing_files, read_finished
from .journal import Journal, read_facts
from .report import LEFT_OUT_NAME, REPORT_NAME, RESPONSES_NAME, RegenerateReport, finish
from .served import ServedModel, name_in
from .target_check import TargetCheck

FORMAT_VERSION = 2
JOURNAL_NAME, LOCK_NAME = "journal.log", ".lock"
OWN_NAMES = (RESPONSES_NAME, LEFT_OUT_NAME, REPORT_NAME, JOURNAL_NAME, LOCK_NAME)
SAMPLING = ("temperature", "top_p", "top_k", "seed", "max_new_tokens")


def regenerate(config: RegenerateConfig, inputs: Sequence[str]) -> RegenerateReport:
    """Fills the folder `config.out`, goes on with it, or finds it finished.

    Raises UserError for a missing input, a folder of other settings, in use or with changed files, a server that
    cannot be reached or refuses everything, one whose prompts are not the target's, and servers whose replies name
    different models; what was answered stays.
    """
    with opened_sources(inputs) as sources:
        check_formats(sources)
        return regenerate_sources(config, sources)


def regenerate_sources(config: RegenerateConfig, sources: Sequence[Path]) -> RegenerateReport:
    folder = Path(config.out)
    try:
        require_own_folder(folder)
        make_folder(folder)
    except OSError as error:
        raise storage_error(error, folder) from error
    check = target_check(config)
    facts = facts_of(config, sources, check)
    with FolderLock(folder, name=LOCK_NAME):
        remove_temporaries(folder)
        done = read_finished(folder)
        missing = missing_files(folder, done) if done else []
        if done is None or (config.retry_failed and done.report["failed"]):
            require_journal(folder, is_finished=done is not None)
            return asyncio.run(answer_all(config, folder, sources, facts, check))
        if config.target is not None and not done.report["checked"]:
            raise UserError(
                f"{str(folder)!r} is finished, and no prompt of it was compared with a target: {config.target!r} "
                "checks nothing now",
                "a target that is given before the lines are answered",
                "drop --target, or choose another --out",
            )
        require_same(folder, done.facts, facts | {"model": config.model or done.facts["model"]})
        if missing:
            write_again(folder, done, len(sources), missing)
        return RegenerateReport(folder, done.facts, done.report, is_new=bool(missing), target=config.target)


def target_check(config: RegenerateConfig) -> TargetCheck | None:
    """The check of the target that was given. Raises UserError for template options that its template does not read."""
    if config.target is None:
        return None
    check = TargetCheck(config.target)
    if idle := check.renderer.template.idle_options(config.template, config.target):
        say(idle)
    return check


def require_own_folder(folder: Path) -> None:
    if not folder.exists():
        return
    strange = sorted(path.name for path in folder.iterdir() if not path.name.startswith(OWN_NAMES))
    if strange:
        raise UserError(
            f"{str(folder)!r} holds {strange[0]!r}",
            "a new folder, an empty one, or one of `dflash regenerate`",
            "choose another --out",
        )


def remove_temporaries(folder: Path) -> None:
    """What a run that was killed while it finished the folder left there; the lock says that none is at it."""
    for path in folder.glob("*.tmp.*"):
        if path.name.startswith(OWN_NAMES):
            path.unlink(missing_ok=True)


def require_journal(folder: Path, *, is_finished: bool) -> None:
    """Raises UserError where lines are to be tried again and the answers of the others are not in a journal."""
    if is_finished and read_facts(folder / JOURNAL_NAME) is None:
        raise UserError(
            f"{str(folder / JOURNAL_NAME)!r} is gone",
            "the journal of the run, from which all lines are written again",
            "give the failed lines to another --out",
        )


def write_again(folder: Path, done: Finished, num_sources: int, missing: Sequence[str]) -> None:
    """Files that a finished folder lost, from its journal. Raises UserError where that does not hold all lines."""
    path, lines_in = folder / JOURNAL_NAME, done.report["lines_in"]
    num_held = 0
    if (facts := read_facts(path)) is not None:
        require_same(folder, facts, done.facts)
        with closing(Journal(path, facts, num_sources)) as journal:
            num_held = journal.counts.total()
            if num_held == lines_in:
                say(f"{', '.join(missing)} of the finished folder {folder} is gone: written again from the journal")
                finish(folder, journal, facts, lines_in)
                return
    raise UserError(
        f"{str(folder / missing[0])!r} of a finished folder is gone, and its journal holds {num_held:,} of "
        f"{lines_in:,} lines",
        "the file, or the whole journal.log from which it is written again",
        f"bring one of them back; or remove {REPORT_NAME}, and the same command asks for the lines that are lost",
    )


def facts_of(config: RegenerateConfig, sources: Sequence[Path], check: TargetCheck | None) -> dict[str, Any]:
    """What decides the answers, the model aside, and the target; a run that goes on must find it unchanged."""
    return {
        "format": FORMAT_VERSION,
        "model": None,
        "target": check.facts if check else None,
        "origin": target_origin(config.temperature),
        "sampling": {name: getattr(config, name) for name in SAMPLING},
        "template": dict(config.template),
        "extra": dict(config.extra),
        "send_thoughts": config.send_thoughts,
        "limit": config.limit,
        "sources": sources_facts(sources),
    }


def require_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises UserError with the first fact that differs, and both of its values; a target not given is the same.

    What replies name the model, `answered_as`, is no setting: `ServedModel` compares it.
    """
    old, new = ({name: fact for name, fact in facts.items() if name != "answered_as"} for facts in (old, new))
    old = {"target": None} | old  # a folder of an earlier version holds none
    if new["target"] is None:
        new = new | {"target": old["target"]}
    if old != new:
        path, was, now = first_difference("facts", old, new)
        raise UserError(
            f"{str(folder)!r} was begun with {path.removeprefix('facts.')} = {short(was)}, this run has {short(now)}",
            "the same settings, inputs and model as before",
            "choose another --out, or go back to what it was",
        )


async def answer_all(
    config: RegenerateConfig, folder: Path, sources: Sequence[Path], facts: dict[str, Any], check: TargetCheck | None
) -> RegenerateReport:
    """Asks for every line that the journal does not hold, then finishes the folder."""
    async with Client(config) as client:
        model = await client.find_model()
        facts = facts | {"model": model}
        path = folder / JOURNAL_NAME
        if (old := read_facts(path)) is not None:
            require_same(folder, old, facts)
            facts = facts | {"target": old["target"]}
        count = num_lines(sources, config.limit)
        with (
            closing(Journal(path, facts, len(sources), retry_failed=config.retry_failed)) as journal,
            bar("regenerate", " lines", total=count, initial=journal.counts.total()) as shown,
        ):
            names = short_names(sources)
            served = ServedModel(model, name_in(journal))
            asker = Asker(config, client, journal, names=names, served=served, check=check, shown=shown)
            try:
                await asker.run(islice(numbered(sources), config.limit))
            except NoEndpoint as error:
                raise UserError(
                    str(error),
                    "a served target at one of the endpoints",
                    f"start it and give the same command again; {journal.counts['answered']:,} answered lines are safe",
                ) from error
            except UserError:
                if not journal.counts.total():
                    path.unlink()  # what is refused before any answer binds no further try
                raise
            finally:
                journal.sync()
            report = finish(folder, journal, facts, asker.lines_in)
    return RegenerateReport(folder, facts, report, is_new=True, target=config.target, endpoints=client.pool.endpoints)


def num_lines(sources: Sequence[Path], limit: int | None) -> int:
    """Input lines of all sources. Raises UserError for a source that is broken further on, before anything is asked."""
    count = sum(chunk.num_lines for path in sources for chunk in chunks(path, KEYS))
    return count if limit is None else min(count, limit)


def numbered(sources: Sequence[Path]) -> Iterator[Numbered]:
    for place, path in enumerate(sources):
        for line in read_lines(path, KEYS):
            yield place, line
