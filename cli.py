"""The front door: one thin click command per thing a user can do.

The commands are built in `commands`, their options from the rooms' config dataclasses. Only click is
imported at the top; a command imports its room when it runs, which keeps `--help` fast.
"""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import click

from . import UserError, __version__, system_reason
from .commands.recording import extract, plan, prepare, regenerate
from .commands.stores import inspect, recode, verify
from .commands.training import evaluate, export, report, serve_check, sweep, train
from .options import made, resolved

Builder = Callable[[], click.Command]


def doctor() -> click.Command:
    def run() -> None:
        from .doctor import examine

        report = examine()
        click.echo(report.text())
        if not report.is_healthy:
            raise SystemExit(1)

    return made("doctor", run, None)


def demo() -> click.Command:
    from .demo import DemoConfig

    def run(**given: Any) -> None:
        from .demo import demo

        demo(resolved(DemoConfig, "demo", given))

    return made("demo", run, DemoConfig)


COMMANDS: dict[str, tuple[Builder, str]] = {
    "prepare": (prepare, "Turn chats or token ids into samples, with a report of every line left out."),
    "regenerate": (regenerate, "Let the served target write the responses, through an OpenAI-compatible endpoint."),
    "plan": (plan, "Say what extract would write: bytes, segments, workers, disk, hours. Writes nothing."),
    "extract": (extract, "Run the target over the samples and record its hidden states in a store."),
    "verify": (verify, "Check every checksum and every fact of a store."),
    "inspect": (inspect, "Show what a store, a run or a sweep holds."),
    "recode": (recode, "Write a finished store anew: another codec, fewer taps, a subset, several made one."),
    "train": (train, "Train a drafter on a store."),
    "sweep": (sweep, "Train many drafters on one store, side by side, and rank them."),
    "evaluate": (evaluate, "Decode with drafter and target: acceptance length, losslessness, speed."),
    "report": (report, "Show runs or a sweep as one HTML page, or as pictures: curves, exams, settings."),
    "export": (export, "Write the drafter in a format that serving engines load."),
    "serve-check": (serve_check, "Start the installed serving engine with the drafter, and compare it with ours."),
    "doctor": (doctor, "Check this machine: packages, devices, limits, who owns the dflash command."),
    "demo": (demo, "The whole pipeline on a small target that comes with the package, on a CPU."),
}


class PastClick(Exception):
    """Carries an error past click, which would take EOFError for Ctrl-C, and a broken pipe for the one of stdout."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class FrontDoor(click.Group):
    """Builds a command when it is asked for; listing them imports nothing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (EOFError, OSError, KeyboardInterrupt) as error:
            raise PastClick(error) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        build, text = COMMANDS[cmd_name]
        command = build()
        command.help = text
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=FrontDoor, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dflash-offline")
def dflash() -> None:
    """Train DFlash drafters offline, from the recorded hidden states of a frozen target.

    The usual order: prepare, extract, train, evaluate, export. `dflash demo` shows it all
    on a small target in a few minutes.
    """


def main(args: list[str] | None = None) -> None:
    """Runs a command; exit codes: 0, 1 user error, 2 usage, 3 stalled, 130 interrupted, 143 after SIGTERM."""
    # Threads that wait by spinning take the core from the thread they wait for when a machine is shared:
    # the same decode took 75 s so and over 240 s spinning (two cores at load 8, 2026-11-30, torch 2.13.0).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        run(args)
    finally:
        silence_broken()


def run(args: list[str] | None) -> None:
    """Runs a command; whatever it raises becomes an exit code and lines on stderr."""
    from .watch import ChildDied, PeerLost, Stalled

    try:
        try:
            dflash.main(args=args, prog_name="dflash", standalone_mode=False)
        except PastClick as carried:
            raise carried.error from None
    except (click.exceptions.Abort, KeyboardInterrupt):
        told = "the same command goes on from what was committed (prepare and evaluate start over)"
        leave(130, f"\ninterrupted; {told}")
    except click.ClickException as error:
        with suppress(OSError):  # of a stderr that takes nothing: the exit code stays
            error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        leave(1, f"error: {error}")
    except (ChildDied, PeerLost) as error:
        told = UserError(str(error), "every process to end by itself", "give the same command again: it goes on")
        leave(1, f"error: {told}")
    except OSError as error:
        if error.errno == errno.EPIPE and is_of_stdout(error):  # a reader that has seen enough, like `head`
            sys.exit(1)
        leave(1, f"error: {of_system(error)}")
    except Stalled as error:
        leave(3, f"stalled: {error}")


def leave(code: int, text: str) -> NoReturn:
    """Ends with this exit code, whether stderr takes the text or not."""
    with suppress(OSError):
        click.echo(text, err=True)
    sys.exit(code)


def is_of_stdout(error: OSError) -> bool:
    """True for one that came from writing a result: `click.echo` raised it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code is click.echo.__code__


def of_system(error: OSError) -> UserError:
    """What is said of an error of the operating system that no room explained: its name, its paths."""
    happened = system_reason(error)
    if is_of_stdout(error):
        return UserError(
            f"standard output takes no more: {happened}",
            "a file or a program that takes the result",
            "check the disk that it is written to; what the command did before stays",
        )
    paths = " -> ".join(repr(os.fsdecode(path)) for path in (error.filename, error.filename2) if path is not None)
    return UserError(
        f"{happened}: {paths}" if paths else happened,
        "files and folders that can be read and written",
        "check the path, its rights and the disk",
    )


def silence_broken() -> None:
    """Drops what a broken stdout or stderr still holds: Python would end with code 120 where it cannot write it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
