"""The finished folder: responses.jsonl, left-out.jsonl, regenerate.json, and how it is told.

Knows journal records and files, no servers. A record holds `row`, which is written as it is, and
`counts`, which are summed; so the same journal gives the same bytes, however often it was interrupted.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from ... import UserError
from ...store.files import NewFile, publish
from .endpoints import Endpoint
from .journal import Journal, as_json

RESPONSES_NAME, LEFT_OUT_NAME, REPORT_NAME = "responses.jsonl", "left-out.jsonl", "regenerate.json"
BUFFER_BYTES = 2**20
SUMMED = ("answers", "cut", "checked", "prompt_tokens", "completion_tokens")


class LineFile(NewFile):
    """A NewFile of JSON lines, written a megabyte at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.held = bytearray()

    def add(self, row: dict[str, Any]) -> None:
        self.held += as_json(row) + b"\n"
        if len(self.held) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        held, self.held = self.held, bytearray()
        self.write(held)

    def finish(self) -> int:
        self.flush()
        return super().finish()


def finish(folder: Path, journal: Journal, facts: dict[str, Any], lines_in: int) -> dict[str, Any]:
    """Writes both files in input order, and regenerate.json last; gives the counts.

    Raises UserError where no line was answered, and forgets the journal then.
    """
    (folder / REPORT_NAME).unlink(missing_ok=True)
    outcomes: Counter[str] = Counter()
    sums: Counter[str] = Counter(dict.fromkeys(SUMMED, 0))
    reasons: dict[str, Counter[str]] = {"failed": Counter(), "skipped": Counter(), "ended": Counter()}
    first = ""
    with LineFile(folder / RESPONSES_NAME) as responses, LineFile(folder / LEFT_OUT_NAME) as left_out:
        for outcome, record in journal.records():
            row = record["row"]
            outcomes[outcome] += 1
            if outcome == "answered":
                sums.update(record["counts"])
                if row["ended"] is not None:
                    reasons["ended"][row["ended"]] += 1
                responses.add(row)
            else:
                reasons[outcome][row["reason"]] += 1
                first = first or f"line {row['line']} of {row['source']}, {row['reason']} ({row['detail']})"
                left_out.add(row)
    total = outcomes["answered"] + outcomes["failed"] + outcomes["skipped"]
    assert total == lines_in, f"{lines_in} input lines, {dict(outcomes)} in the journal"
    if not outcomes["answered"]:
        journal.path.unlink()
        raise nothing_answered(lines_in, first, folder)
    report = {
        "lines_in": lines_in,
        **{name: outcomes[name] for name in ("answered", "failed", "skipped")},
        **{f"{name}_reasons": dict(sorted(found.items())) for name, found in reasons.items()},
        **sums,
    }
    content = json.dumps({"facts": facts, "report": report}, indent=2)
    publish(folder / REPORT_NAME, f"{content}\n".encode())
    return report


def nothing_answered(lines_in: int, first: str, folder: Path) -> UserError:
    """Settings or server are wrong then, not the lines; nothing is kept that would bind the next try."""
    if not lines_in:
        return UserError("the inputs hold no line", "at least one chat", "check the files")
    return UserError(
        f"none of {lines_in:,} input lines was answered, the first: {first}",
        "chats that the served model answers",
        f"see {str(folder / LEFT_OUT_NAME)!r}, mend the cause, and give the command again",
    )


def read_finished(folder: Path) -> dict[str, Any] | None:
    """Facts and report of a finished folder; None where it is not finished."""
    path = folder / REPORT_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"facts": content["facts"], "report": content["report"]}
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read: {error}", "facts and report", "remove it; the same command writes it again"
        ) from error


@dataclass(frozen=True, slots=True)
class RegenerateReport:
    """What lies in the folder; `is_new` is False when an earlier run had finished it."""

    folder: Path
    facts: dict[str, Any]
    counts: dict[str, Any]
    is_new: bool
    target: str | None = None
    endpoints: list[Endpoint] = field(default_factory=list)

    def text(self) -> str:
        c, facts = self.counts, self.facts
        lines = [
            f"{self.folder / RESPONSES_NAME}: {c['answered']:,} chats answered by {facts['model']} ({facts['origin']})"
            + ("" if self.is_new else "; complete already, nothing changed"),
            f"{c['lines_in']:,} input lines = {c['answered']:,} answered + {c['failed']:,} failed + "
            f"{c['skipped']:,} skipped",
        ]
        for name, text in (("failed", "failed"), ("skipped", "skipped"), ("ended", "ended early")):
            lines += [f"  {text}: {count:,} {reason}" for reason, count in ordered(c, name)]
        limit = facts["sampling"]["max_new_tokens"]
        lines.append(
            f"{c['answers']:,} answers, {c['completion_tokens']:,} tokens written; "
            f"{c['cut']:,} cut at the limit of {limit:,} tokens"
        )
        if c["checked"]:
            lines.append(
                f"{c['checked']:,} of {c['answers']:,} prompts are as long as the target's template makes them"
            )
        else:
            lines.append("no prompt was compared with a target's own template; --target T does it")
        for endpoint in self.endpoints:
            aside = f", set aside {endpoint.times_aside:,} times" if endpoint.times_aside else ""
            lines.append(f"{endpoint.url}: {endpoint.replies:,} replies, {endpoint.retries:,} tries again{aside}")
        if c["failed"]:
            lines.append(f"see {self.folder / LEFT_OUT_NAME}; --retry-failed tries the failed lines again")
        target = quote(self.target) if self.target else "TARGET"
        lines.append(f"next: dflash prepare {quote(str(self.folder / RESPONSES_NAME))} --target {target}")
        return "\n".join(lines)


def ordered(counts: dict[str, Any], name: str) -> list[tuple[str, int]]:
    return sorted(counts[f"{name}_reasons"].items(), key=lambda item: -item[1])
