"""What the documentation says exists: commands, options, files, links."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from dflash_offline.cli import COMMANDS
from dflash_offline.settings import is_section
from dflash_offline.train.config import EvaluateConfig, ExportConfig, TrainConfig
from dflash_offline.train.metrics import DEFINITIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CODE = re.compile(r"```.*?\n(.*?)```|`([^`\n]+)`", re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(?:dflash|dflash-offline) ([a-z]+)\b(.*)$", re.MULTILINE)


def commands_in(page: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for fenced, inline in CODE.findall(page.read_text()):
        text = re.sub(r"\\\n\s*", " ", fenced or inline)
        found += [(name, rest.split(" #")[0]) for name, rest in COMMAND.findall(text)]
    return found


def test_there_are_commands_to_check() -> None:
    assert len(commands_in(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_line_is_accepted(page: Path) -> None:
    for name, rest in commands_in(page):
        assert name in COMMANDS, f"{page.name}: dflash {name}"
        command = COMMANDS[name][0]()
        known = {flag for p in command.params if isinstance(p, click.Option) for flag in [*p.opts, *p.secondary_opts]}
        for word in shlex.split(rest):
            if word.startswith("--") and word != "--help":
                assert word.split("=")[0] in known, f"{page.name}: dflash {name} {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_linked_file_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_files_named_in_the_design_are_there() -> None:
    for name in re.findall(r"`((?:store|extract|train|tests)/[\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text()):
        assert (ROOT / name).is_file(), name


def test_the_fields_named_after_set_are_there() -> None:
    tables = {"train": TrainConfig, "evaluate": EvaluateConfig, "export": ExportConfig}
    for page in PAGES:
        for name, rest in commands_in(page):
            for path in re.findall(r"--set ([\w.]+)=", rest):
                config: type = tables[name]
                for part in path.split("."):
                    assert part in config.__dataclass_fields__, f"{page.name}: {path}"  # type: ignore[attr-defined]
                    if is_section(config, part):
                        config = config.__dataclass_fields__[part].default_factory  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "benchmarks").glob("*.json")), ids=lambda p: p.name)
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
