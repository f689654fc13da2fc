"""The front door: one thin click command per thing a user can do.

Options are made from the rooms' config dataclasses by `options`. Only click is imported at the
top; a command imports its room when it runs, which keeps `--help` fast.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

import click

from . import UserError, __version__
from .options import DEFAULT_FILE, options_of, resolved

Builder = Callable[[], click.Command]
SAMPLES_IN_HTML = 20
PNG_MARK = b"\x89PNG\r\n\x1a\n"


def prepare() -> click.Command:
    from .extract.config import PrepareConfig

    def run(chats: tuple[str, ...], **given: Any) -> None:
        from .extract.prepare import prepare
        from .extract.show.html import require_page_path, show_html

        config = resolved(PrepareConfig, "prepare", given)
        if config.html is not None:
            require_page_path(Path(config.html), Path(config.out))
        click.echo(prepare(config, chats).text())
        if config.show:
            from .extract.show.show import show

            click.echo("\n" + show(Path(config.out), config.show), color=True)
        if config.html is not None:
            show_html(Path(config.out), config.show or SAMPLES_IN_HTML, Path(config.html))
            click.echo(f"samples to look at in {config.html}")

    chats = click.Argument(["chats"], nargs=-1, required=True)
    return made("prepare", run, PrepareConfig, [chats])


def regenerate() -> click.Command:
    from .extract.regenerate.config import RegenerateConfig

    def run(chats: tuple[str, ...], **given: Any) -> None:
        from .extract.regenerate.run import regenerate

        click.echo(regenerate(resolved(RegenerateConfig, "regenerate", given), chats).text())

    chats = click.Argument(["chats"], nargs=-1, required=True)
    return made("regenerate", run, RegenerateConfig, [chats])


def plan() -> click.Command:
    from .extract.config import PlanConfig

    def run(**given: Any) -> None:
        from .extract.foretell import plan_command

        click.echo(plan_command(resolved(PlanConfig, "extract", given)).text())

    return made("plan", run, PlanConfig)


def extract() -> click.Command:
    from .extract.config import ExtractConfig

    def run(**given: Any) -> None:
        from .extract.launch import extract

        click.echo(extract(resolved(ExtractConfig, "extract", given)).text())

    return made("extract", run, ExtractConfig)


def verify() -> click.Command:
    def run(store: str, workers: int | None, is_repaired: bool) -> None:
        from .store.integrity import verify
        from .store.repair import lock_for_repair, repair
        from .store.summary import faults_text, verify_text

        with lock_for_repair(Path(store)) if is_repaired else nullcontext():
            report = verify(Path(store), workers=workers)
            click.echo(verify_text(report))
            if not report.faults:
                return
            advice = f"see the faults above; `dflash verify {quote(store)} --repair` marks damaged segments for extract"
            if is_repaired:
                click.echo(repair(Path(store), report).text())
                advice = "do what is said above, then verify again"
        happened = f"{faults_text(len(report.faults))} in {store!r}, the first: {report.faults[0]}"
        raise UserError(happened, "every checksum and every fact to hold", advice)

    workers = click.Option(
        ["--workers"], type=click.IntRange(min=1), metavar="N", help="threads; default: one per core, at most 8"
    )
    is_repaired = click.Option(
        ["--repair", "is_repaired"],
        is_flag=True,
        help="mark damaged segments, so that the same extract records them again",
    )
    return made("verify", run, None, [click.Argument(["store"]), workers, is_repaired])


def inspect() -> click.Command:
    def run(folder: str, png: str | None) -> None:
        path = Path(folder)
        if png is not None:
            require_picture_path(Path(png))
        kind = next((kind for kind in ("run", "sweep") if (path / f"{kind}.json").is_file()), None)
        if kind is not None:
            from .train.summary import describe_run, describe_sweep

            if png is not None:
                raise UserError(
                    f"--png {png} with the {kind} {folder!r}", "a store", f"see the pictures in the {kind}'s folder"
                )
            click.echo(describe_run(path) if kind == "run" else describe_sweep(path))
        else:
            from .store.summary import describe_store, plot_store, read_facts

            facts = read_facts(path)
            click.echo(describe_store(facts))
            if png is not None:
                click.echo(f"lengths drawn in {plot_store(facts, Path(png))}")

    png = click.Option(["--png"], metavar="FILE", help="draw the lengths of a store's samples into this file")
    return made("inspect", run, None, [click.Argument(["folder"]), png])


def require_picture_path(path: Path) -> None:
    """Raises UserError unless a picture may and can be written here. Tries it, before a store is read; leaves nothing.

    A file that is there must be a PNG itself.
    """
    from .store.files import NewFile

    if path.is_dir():
        raise UserError(f"--png {str(path)!r} is a folder", "a file for the picture", "name a file, like lengths.png")
    if os.path.lexists(path) and not is_png(path):
        raise UserError(
            f"--png {str(path)!r} is there and is no PNG", "a new file, or an earlier picture", "name another file"
        )
    NewFile(path).abort()


def is_png(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(PNG_MARK)) == PNG_MARK


def report() -> click.Command:
    def run(folders: tuple[str, ...], html: bool, png: bool, out: str | None) -> None:
        from .train.report.report import report

        written = report(
            [Path(folder) for folder in folders], Path(out) if out else None, has_page=html, has_pictures=png
        )
        click.echo(written.text())

    options = [
        click.Option(["--html"], is_flag=True, help="write one page that loads nothing: curves, exams, settings"),
        click.Option(["--png"], is_flag=True, help="write the same charts as pictures, into a folder beside the page"),
        click.Option(
            ["--out"], metavar="FILE", help="the page; default: report.html in the folder, or here for several runs"
        ),
    ]
    folders = click.Argument(["folders"], nargs=-1, required=True, metavar="RUN|SWEEP...")
    return made("report", run, None, [folders, *options])


def recode() -> click.Command:
    from .store.config import RecodeConfig

    def run(stores: tuple[str, ...], **given: Any) -> None:
        from .store.recode import recode

        click.echo(recode(resolved(RecodeConfig, "recode", given), stores).text())

    return made("recode", run, RecodeConfig, [click.Argument(["stores"], nargs=-1, required=True, metavar="STORE...")])


def train() -> click.Command:
    from .train.config import TrainConfig

    def run(**given: Any) -> None:
        from .train.worker import train

        report = train(resolved(TrainConfig, "train", given))
        if report is not None:
            click.echo(report.text())

    return made("train", run, TrainConfig)


def sweep() -> click.Command:
    from .train.sweep.config import SweepConfig

    def run(**given: Any) -> None:
        from .settings import read_table
        from .train.sweep.sweep import sweep

        file = given["config"] or (DEFAULT_FILE if Path(DEFAULT_FILE).is_file() else None)
        config = resolved(SweepConfig, "sweep", given)
        found = sweep(config, read_table(Path(file), "train") if file else {}, lambda *exam: examined(*exam).as_dict())
        click.echo(found.text())
        if not found.is_sound:
            raise SystemExit(1)

    return made("sweep", run, SweepConfig)


def examined(folder: Path, config: Any) -> Any:
    """The report of an exam: the target, prompts and their lines come from `extract`."""
    from .extract.questions import read_lines, read_questions
    from .train.evaluate.evaluate import evaluate

    return evaluate(folder, config, open_target, read_questions, read_lines)


def open_target(name: str, device: str, dtype: str) -> Any:
    """A loaded target; where its kernels are slower than they could be, that is said."""
    from .extract.targets.hf import load_target
    from .progress import say

    target = load_target(name, device=device, dtype=dtype)
    if target.kernel_note:
        say(target.kernel_note)
    return target


def evaluate() -> click.Command:
    from .train.evaluate.config import EvaluateConfig

    def run(folder: str | None, **given: Any) -> None:
        # Two results need none of the settings that a folder's file keeps for its exams.
        file = "" if given["compare"] else DEFAULT_FILE
        config = resolved(EvaluateConfig, "evaluate", given, default_file=file)
        if config.compare is not None:
            from .train.evaluate.compare import compare

            if folder is not None:
                raise click.UsageError(f"RUN {folder!r} beside --compare, which evaluates nothing")
            click.echo(compare(*config.compare).text())
            return
        assert folder is not None
        click.echo(examined(Path(folder), config).text())

    def run_given(ctx: click.Context, param: click.Parameter, folder: str | None) -> str | None:
        if folder is None and not ctx.params.get("compare"):
            raise click.MissingParameter(ctx=ctx, param=param)
        return folder

    folder = click.Argument(["folder"], metavar="RUN_OR_FOLDER", required=False, callback=run_given)
    return made("evaluate", run, EvaluateConfig, [folder])


def export() -> click.Command:
    from .train.export.config import ExportConfig

    def run(folder: str, **given: Any) -> None:
        from .train.export.export import export

        def read_target(name: str) -> Any:
            from .extract.targets.facts import read_facts

            return read_facts(name).as_plain()

        config = resolved(ExportConfig, "export", given)
        click.echo(export(Path(folder), config, read_target=read_target).text())

    return made("export", run, ExportConfig, [click.Argument(["folder"], metavar="RUN_OR_FOLDER")])


def serve_check() -> click.Command:
    from .train.serve_check.config import ServeCheckConfig

    def run(folder: str, **given: Any) -> None:
        config = resolved(ServeCheckConfig, "serve-check", given)
        from .extract.questions import read_lines, read_questions
        from .extract.served_target import chat_request, served_path
        from .train.serve_check.check import TargetSide, serve_check

        side = TargetSide(
            open_target=open_target,
            read_lines=read_lines,
            read_questions=read_questions,
            chat_request=chat_request,
            served_path=served_path,
        )
        report = serve_check(Path(folder), config, side)
        click.echo(report.text())
        if not report.agrees:
            raise SystemExit(1)

    return made("serve-check", run, ServeCheckConfig, [click.Argument(["folder"], metavar="RUN")])


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


class FrontDoor(click.Group):
    """Builds a command when it is asked for; listing them imports nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return COMMANDS[cmd_name][0]() if cmd_name in COMMANDS else None

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


def made(
    name: str, run: Callable[..., None], config_class: type | None, arguments: Sequence[click.Parameter] = ()
) -> click.Command:
    """A click command with these arguments, and the options of a config class."""
    params = [*arguments, *(options_of(config_class, table_name(name)) if config_class is not None else [])]
    return click.Command(name, callback=run, params=params, help=COMMANDS[name][1])


def table_name(command: str) -> str:
    """The table of a config file that a command reads."""
    return "extract" if command == "plan" else command


def fail(error: UserError) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    sys.exit(1)


def main(args: list[str] | None = None) -> None:
    """Runs a command; exit codes: 0, 1 user error, 2 usage, 3 stalled, 130 interrupted, 143 after SIGTERM."""
    from .watch import ChildDied, PeerLost, Stalled

    # Threads that wait by spinning take the core from the thread they wait for when a machine is shared:
    # the same decode took 75 s so and over 240 s spinning (two cores at load 8, 2026-11-30, torch 2.13.0).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        dflash.main(args=args, prog_name="dflash", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        told = "the same command goes on from what was committed (prepare and evaluate start over)"
        click.echo(f"interrupted; {told}", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        fail(error)
    except (ChildDied, PeerLost) as error:
        fail(UserError(str(error), "every process to end by itself", "give the same command again: it goes on"))
    except OSError as error:
        happened = " ".join(str(error).split()) or type(error).__name__
        fail(
            UserError(
                happened, "files and folders that can be read and written", "check the path, its rights and the disk"
            )
        )
    except Stalled as error:
        click.echo(f"stalled: {error}", err=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
