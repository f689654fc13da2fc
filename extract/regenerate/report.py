"""The finished folder: responses.jsonl, left-out.jsonl, regenerate.json, and how it is told.

Knows journal records and files, no servers. A record holds `row`, which is written as it is, and
`counts`, which are summed, and `said`, the name of the model in the replies by endpoint; so the same journal gives
the same bytes, however often it was interrupted. regenerate.json holds size and hash of the other two files.
"""

import hashlib
import json
from collections import Counter, defaultdict
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
SUMMED = ("answers", "cut", "checked", "replaced", "prompt_tokens", "completion_tokens")


class LineFile(NewFile):
    """A NewFile of JSON lines, written a megabyte at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.held = bytearray()
        self.digest = hashlib.sha256()

    def add(self, row: dict[str, Any]) -> None:
        self.held += as_json(row) + b"\n"
        if len(self.held) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        held, self.held = self.held, bytearray()
        self.digest.update(held)
        self.write(held)

    def finish(self) -> int:
        self.flush()
        return super().finish()

    def facts(self) -> dict[str, Any]:
        """Size and hash of the finished file."""
        return {"size_bytes": self.size_bytes, "sha256": self.digest.hexdigest()}


def finish(folder: Path, journal: Journal, facts: dict[str, Any], lines_in: int) -> dict[str, Any]:
    """Writes both files in input order, and regenerate.json last; gives the counts.

    Raises UserError where no line was answered, and forgets the journal then.
    """
    (folder / REPORT_NAME).unlink(missing_ok=True)
    outcomes: Counter[str] = Counter()
    sums: Counter[str] = Counter(dict.fromkeys(SUMMED, 0))
    reasons: dict[str, Counter[str]] = {"failed": Counter(), "skipped": Counter(), "ended": Counter()}
    said: defaultdict[str, set[str]] = defaultdict(set)
    first = ""
    with LineFile(folder / RESPONSES_NAME) as responses, LineFile(folder / LEFT_OUT_NAME) as left_out:
        for outcome, record in journal.records():
            row = record["row"]
            outcomes[outcome] += 1
            if outcome == "answered":
                sums.update(record["counts"])
                for url, name in record["said"].items():
                    said[url].add(name)
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
        "models": {url: sorted(names) for url, names in sorted(said.items())},
    }
    facts = facts | {"answered_as": sorted(set().union(*said.values()))}
    files = {RESPONSES_NAME: responses.facts(), LEFT_OUT_NAME: left_out.facts()}
    content = json.dumps({"facts": facts, "report": report, "files": files}, indent=2)
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
        for url, names in c["models"].items():
            if names != [facts["model"]]:
                lines.append(f"{url}: its replies name the model {', '.join(names)}")
        if c["replaced"]:
            lines.append(f"{c['replaced']:,} lone surrogates of the input replaced by U+FFFD")
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
