"""The front door: speed, help, exit codes, and docs/cli.md as the help output."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from dflash_offline.cli import COMMANDS, dflash, main
from dflash_offline.options import made

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
    """In processor time, against that of Python with click: neither load nor a slow machine counts (2.3 times)."""
    times: dict[str, list[float]] = {"dflash --help": [], "python": []}
    commands = {"dflash --help": ["-m", "dflash_offline.cli", "--help"], "python": ["-c", "import click"]}
    for _ in range(5):
        for name, command in commands.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *command], capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times["dflash --help"]) < 6 * min(times["python"]), times


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


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ECHO = (
    "import click\nfrom dflash_offline import cli\nfrom dflash_offline.options import made\n"
    "cli.COMMANDS['doctor'] = (lambda: made('doctor', lambda: click.echo('found'), None), '')\ncli.main(['doctor'])\n"
)


def echoed(stdout: Any) -> "subprocess.CompletedProcess[str]":
    """A command that gives a result into a file or a pipe."""
    return subprocess.run([sys.executable, "-c", ECHO], stdout=stdout, stderr=subprocess.PIPE, text=True, env=BUFFERED)


def test_a_result_that_standard_output_does_not_take() -> None:
    with open("/dev/full", "w") as full:
        done = echoed(full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output takes no more: No space left on device (ENOSPC)\nexpected: ")
    assert len(done.stderr.splitlines()) == 3


def test_a_reader_that_has_seen_enough_is_no_news() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = echoed(writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("args, code", [(["inspect", "nowhere"], 1), (["recode"], 2)], ids=["error", "usage"])
def test_the_exit_code_stays_where_stderr_takes_nothing(args: list[str], code: int) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dflash_offline.cli", *args], stdout=subprocess.PIPE, stderr=full, env=BUFFERED
        )
    assert (done.returncode, done.stdout) == (code, b"")


@pytest.mark.parametrize(
    "error, told",
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe (EPIPE)"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device (ENOSPC)"),
        (OSError(errno.EIO, "Input/output error", "/data/a"), "Input/output error (EIO): '/data/a'"),
        (OSError(errno.EXDEV, "Invalid", "a", None, b"b"), "Invalid (EXDEV): 'a' -> 'b'"),
        (OSError("got end of file\nduring message"), "got end of file during message (unknown error)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, OSError) else "told",
)
def test_an_error_of_the_system_is_told_with_its_name_and_paths(
    error: OSError, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a broken pipe, which click takes for that of stdout and says nothing of."""
    with pytest.raises(SystemExit) as caught:
        main_raising(error, monkeypatch)
    assert caught.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: {told}"
    assert [line.split(":")[0] for line in lines[1:]] == ["expected", "to do"]


def test_a_file_that_ends_too_early_is_no_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """click takes an EOFError for Ctrl-D at a prompt, and we would say that the same command goes on."""
    with pytest.raises(EOFError, match="ran out of input"):
        main_raising(EOFError("ran out of input"), monkeypatch)


def test_an_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main_raising(KeyboardInterrupt(), monkeypatch)
    assert caught.value.code == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err


def main_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front door with a command that raises."""

    def fail() -> None:
        raise error

    monkeypatch.setitem(COMMANDS, "doctor", (lambda: made("doctor", fail, None), ""))
    main(["doctor"])


if __name__ == "__main__":
    (ROOT / "docs" / "cli.md").write_text(cli_page())
