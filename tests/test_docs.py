"""What the documentation says exists: commands, options, their values, files, links, measured numbers.

`python tests/test_docs.py` writes the tables of docs/benchmarks.md from docs/benchmarks/*.json.
"""

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from dflash_offline import UserError
from dflash_offline.cli import COMMANDS
from dflash_offline.demo import DemoConfig
from dflash_offline.extract.config import ExtractConfig, PlanConfig, PrepareConfig
from dflash_offline.extract.devices import choose_devices
from dflash_offline.extract.regenerate.config import RegenerateConfig
from dflash_offline.options import resolved, table_name
from dflash_offline.store.config import RecodeConfig
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.metrics import DEFINITIONS
from dflash_offline.train.serve_check.config import ServeCheckConfig
from dflash_offline.train.sweep.config import SweepConfig

ROOT = Path(__file__).parents[1]
CONFIGS: dict[str, type] = {
    "prepare": PrepareConfig,
    "regenerate": RegenerateConfig,
    "extract": ExtractConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "recode": RecodeConfig,
    "sweep": SweepConfig,
    "serve-check": ServeCheckConfig,
    "demo": DemoConfig,
}
PLACEHOLDERS = {"a.b=c", "section.field=value"}  # the form of `--set`, not a field
BENCHMARKS_PAGE = ROOT / "docs" / "benchmarks.md"
BENCHMARKS = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CODE = re.compile(r"```.*?\n(.*?)```|`([^`\n]+)`", re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(?:dflash|dflash-offline) ([a-z]+(?:-[a-z]+)*)\b(.*)$", re.MULTILINE)


def commands_in(page: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for fenced, inline in CODE.findall(page.read_text()):
        text = re.sub(r"\\\n\s*", " ", fenced or inline)
        found += [(name, rest.split(" #")[0]) for name, rest in COMMAND.findall(text)]
    return found


def test_there_are_commands_to_check() -> None:
    assert len(commands_in(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_line_is_accepted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a dflash.toml lying about would fill in settings
    for name, rest in commands_in(page):
        assert name in COMMANDS, f"{page.name}: dflash {name}"
        words = shlex.split(rest)
        if words and "--help" not in words:
            try:
                check_line(name, words)
            except (click.ClickException, UserError, AssertionError) as error:
                pytest.fail(f"{page.name}: dflash {name}{rest}: {error}")


def check_line(name: str, words: list[str]) -> None:
    """Parses a line as `dflash` would and makes its config; raises what `dflash` would, before it ran."""
    command = COMMANDS[name][0]()
    context = command.make_context(name, list(words))
    given = {p.name: context.params[p.name] for p in command.params if isinstance(p, click.Option) and p.name}
    if "config" not in given:
        return
    file = given["config"]
    if file is not None and not Path(file).exists():  # a page may name a file that its reader has
        assert file.endswith(".toml"), f"--config {file}"
        given["config"] = None
    config = resolved(PlanConfig if name == "plan" else CONFIGS[table_name(name)], table_name(name), given)
    if isinstance(config, ExtractConfig):
        choose_devices(config.devices, 8)
    device, checkpoint = getattr(config, "device", "auto"), getattr(config, "checkpoint", "latest")
    assert re.fullmatch(r"auto|cpu|cuda(:[0-7])?", device), f"--device {device}"
    assert re.fullmatch(r"latest|best|[0-9]+", checkpoint), f"--checkpoint {checkpoint}"


@pytest.mark.parametrize(
    "name, line",
    [
        ("train", "--store hs --speed 9"),
        ("train", "--layers five"),
        ("train", "--optimizer adam"),
        ("train", "--devices gpu6"),
        ("train", "--set rows.rows=4"),
        ("train", "--set rows.rows_per_step=many"),
        ("extract", "--devices 0-8"),
        ("extract", "--taps one,two"),
        ("evaluate", "--offline"),
        ("evaluate", "runs/a --checkpoint newest"),
        ("prepare", "chats.jsonl --responses model"),
        ("verify", "--store hs"),
    ],
)
def test_a_wrong_line_would_be_found(name: str, line: str) -> None:
    with pytest.raises((click.ClickException, UserError, AssertionError)):
        check_line(name, shlex.split(line))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_linked_file_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_files_named_in_the_design_are_there() -> None:
    for name in re.findall(r"`((?:store|extract|train|tests)/[\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text()):
        assert (ROOT / name).is_file(), name


def test_the_fields_named_after_set_are_there() -> None:
    """An override on its own, in running text: some command takes it. `...` stands for any value."""
    for page in PAGES:
        for override in set(re.findall(r"`--set ([^`]+)`", page.read_text())) - PLACEHOLDERS:
            field, _, value = override.partition("=")
            assert any(takes(config, field, value) for config in CONFIGS.values()), f"{page.name}: --set {override}"


def takes(config: type, field: str, value: str) -> bool:
    given: dict[str, Any] = {"config": None, "set": (f"{field}={'1' if value == '...' else value}",)}
    with contextlib.suppress(UserError):
        return resolved(config, "any", given) is not None
    return False


def benchmark_block(path: Path) -> str:
    """What docs/benchmarks.md says of one kept result, between its two marks."""
    kept = json.loads(path.read_text())
    rows = [f"| {row['name']} | {number(row['value'])} | {row['unit']} |" for row in kept["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    origin = f"{kept['device']}; {versions}; commit {kept['commit']}, {kept['date']}:"
    return "\n".join(["| Name | Value | Unit |", "| --- | ---: | --- |", *rows, "", origin, "", f"`{kept['command']}`"])


def number(value: float) -> str:
    """Every digit that the file holds."""
    return f"{value:,}" if isinstance(value, int) else repr(value)


def benchmarks_page(page: str) -> str:
    """The page with the block of every kept result made anew; a result without a section gets one at the end."""
    for path in BENCHMARKS:
        first, last = f"<!-- {path.stem} -->\n", f"\n<!-- end of {path.stem} -->"
        if first not in page:
            page = f"{page.rstrip()}\n\n## {path.stem}\n\n{first}{last}\n"
        before, _, rest = page.partition(first)
        assert last in rest, f"{last.strip()} is missing in {BENCHMARKS_PAGE.name}"
        page = before + first + benchmark_block(path) + rest[rest.index(last) :]
    return page


def test_the_benchmarks_page_holds_the_kept_numbers() -> None:
    page = BENCHMARKS_PAGE.read_text()
    assert page == benchmarks_page(page), "run `python tests/test_docs.py`"
    sections = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert sorted(sections) == sorted(re.findall(r"<!-- (\w+) -->", page)) == [path.stem for path in BENCHMARKS]


def test_prose_survives_a_new_number() -> None:
    page, first = BENCHMARKS_PAGE.read_text(), f"<!-- {BENCHMARKS[0].stem} -->\n"
    longer = page.replace(first, f"Prose.\n\n{first}") + "\nMore prose.\n"
    assert benchmarks_page(longer.replace(first, f"{first}| stale | 1 | s |\n")) == longer


def test_a_result_without_a_section_gets_one() -> None:
    made = benchmarks_page("# Benchmarks\n")
    assert re.findall(r"^## (\w+)$", made, re.MULTILINE) == [path.stem for path in BENCHMARKS]
    assert benchmarks_page(made) == made


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: p.name)
def test_a_kept_benchmark_says_how_it_was_measured(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["bench"] == path.stem
    assert (ROOT / "tests" / "bench" / f"{path.stem}.py").is_file()
    assert {"device", "versions", "command", "commit", "date"} <= set(result)
    assert all(set(row) == {"name", "value", "unit"} for row in result["rows"])


def test_every_metric_is_defined_in_the_training_page() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    for name, text in DEFINITIONS.items():
        assert f"| `{name}` | {text} |" in page


if __name__ == "__main__":
    BENCHMARKS_PAGE.write_text(benchmarks_page(BENCHMARKS_PAGE.read_text()))
