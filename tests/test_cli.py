"""The front door: speed, help, exit codes, and docs/cli.md as the help output."""

import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from dflash_offline.cli import COMMANDS, dflash

ROOT = Path(__file__).parents[1]


def help_of(command: list[str]) -> str:
    return CliRunner().invoke(dflash, [*command, "--help"], prog_name="dflash", terminal_width=100).output


def cli_page() -> str:
    """The text of docs/cli.md; `python tests/test_cli.py` writes it."""
    parts = ["# Commands", "", "The output of `--help`; a test compares this page with it.", ""]
    for command in [[], *([name] for name in COMMANDS)]:
        parts += [f"## dflash {' '.join(command)}".rstrip(), "", "```", help_of(command).rstrip(), "```", ""]
    return "\n".join(parts).rstrip() + "\n"


def run(*args: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "dflash_offline.cli", *args], capture_output=True, text=True, cwd=cwd)


def test_the_cli_page_is_the_help_output() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == cli_page(), "run `python tests/test_cli.py`"


def test_help_answers_at_once() -> None:
    """In processor time, which does not depend on what else the machine is doing."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    assert min(times) < 0.5, times


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_at_most_a_dozen_options(name: str) -> None:
    command = COMMANDS[name][0]()
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in ("config", "set", "help")]
    assert len([option for option in options if not option.hidden]) <= 12
    assert all(option.help for option in options)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_help_does_not_show_is_documented(name: str) -> None:
    page = "\n".join((ROOT / "docs" / name).read_text() for name in ("extraction.md", "training.md"))
    hidden = [p for p in COMMANDS[name][0]().params if isinstance(p, click.Option) and p.hidden]
    assert all(any(f"`{own}" in page for own in (*option.opts, *option.secondary_opts)) for option in hidden)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy(name: str) -> None:
    code = (
        "import sys\nfrom dflash_offline.cli import main\n"
        f"try:\n    main(['{name}', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "args, code, told",
    [
        (["nonsense"], 2, "No such command"),
        (["extract", "--shards", "many"], 2, "--shards"),
        (["extract", "--shards", "0"], 1, "shards"),
        (["extract", "--data", "nowhere"], 1, "nowhere"),
        (["train", "--store", "nowhere"], 1, "nowhere"),
        (["train", "--set", "optim.speed=1"], 1, "optim.speed"),
        (["extract", "--set", "data=2026-01-31"], 1, "'2026-01-31'"),
        (["extract", "--set", "data=1_000"], 1, "'1_000'"),
        (["extract", "--set", "data=true"], 1, "'true'"),
        (["extract", "--set", 'data="in quotes"'], 1, "'in quotes'"),
        (["evaluate", "nowhere"], 1, "nowhere"),
        (["export", "nowhere"], 1, "nowhere"),
        (["verify", "nowhere"], 1, "nowhere"),
        (["inspect", "nowhere"], 1, "nowhere"),
        (["recode", "nowhere", "there"], 1, "nowhere"),
        (["recode"], 2, "STORE"),
        (["prepare", "nowhere.jsonl", "--target", "tiny"], 1, "nowhere.jsonl"),
        (["prepare", __file__, "--target", "unknown-target"], 1, "unknown-target"),
    ],
)
def test_errors_have_an_exit_code_and_three_lines(args: list[str], code: int, told: str, tmp_path: Path) -> None:
    done = run(*args, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        lines = done.stderr.strip().splitlines()[-3:]
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("expected: ")
        assert lines[2].startswith("to do: ")
    assert list(tmp_path.iterdir()) == []


def test_dflash_toml_in_the_folder_is_used_and_named(tmp_path: Path) -> None:
    (tmp_path / "dflash.toml").write_text('[extract]\ndata = "from-the-file"\n')
    done = run("extract", cwd=tmp_path)
    assert done.returncode == 1
    assert "settings from dflash.toml" in done.stderr
    assert "from-the-file" in done.stderr


if __name__ == "__main__":
    (ROOT / "docs" / "cli.md").write_text(cli_page())
