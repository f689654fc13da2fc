"""The commands from a store to a served drafter; here `extract` hands targets and the reading of lines to `train`."""

from pathlib import Path
from typing import Any

import click

from ..options import DEFAULT_FILE, made, resolved


def train() -> click.Command:
    from ..train.config import TrainConfig

    def run(**given: Any) -> None:
        from ..train.worker import train

        report = train(resolved(TrainConfig, "train", given))
        if report is not None:
            click.echo(report.text())

    return made("train", run, TrainConfig)


def sweep() -> click.Command:
    from ..train.sweep.config import SweepConfig

    def run(**given: Any) -> None:
        from ..settings import read_table
        from ..train.sweep.sweep import sweep

        file = given["config"] or (DEFAULT_FILE if Path(DEFAULT_FILE).is_file() else None)
        config = resolved(SweepConfig, "sweep", given)
        found = sweep(config, read_table(Path(file), "train") if file else {}, lambda *exam: examined(*exam).as_dict())
        click.echo(found.text())
        if not found.is_sound:
            raise SystemExit(1)

    return made("sweep", run, SweepConfig)


def examined(folder: Path, config: Any) -> Any:
    """The report of an exam: the target, prompts and their lines come from `extract`."""
    from ..extract.questions import read_lines, read_questions
    from ..train.evaluate.evaluate import evaluate

    return evaluate(folder, config, open_target, read_questions, read_lines)


def open_target(name: str, device: str, dtype: str) -> Any:
    """A loaded target; where its kernels are slower than they could be, that is said."""
    from ..extract.targets.hf import load_target
    from ..progress import say

    target = load_target(name, device=device, dtype=dtype)
    if target.kernel_note:
        say(target.kernel_note)
    return target


def evaluate() -> click.Command:
    from ..train.evaluate.config import EvaluateConfig

    def run(folder: str | None, **given: Any) -> None:
        # Two results need none of the settings that a folder's file keeps for its exams.
        file = "" if given["compare"] else DEFAULT_FILE
        config = resolved(EvaluateConfig, "evaluate", given, default_file=file)
        if config.compare is not None:
            from ..train.evaluate.compare import compare

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
    from ..train.export.config import ExportConfig

    def run(folder: str, **given: Any) -> None:
        from ..train.export.export import export

        def read_target(name: str) -> Any:
            from ..extract.targets.facts import read_facts

            return read_facts(name).as_plain()

        config = resolved(ExportConfig, "export", given)
        click.echo(export(Path(folder), config, read_target=read_target).text())

    return made("export", run, ExportConfig, [click.Argument(["folder"], metavar="RUN_OR_FOLDER")])


def serve_check() -> click.Command:
    from ..train.serve_check.config import ServeCheckConfig

    def run(folder: str, **given: Any) -> None:
        config = resolved(ServeCheckConfig, "serve-check", given)
        from ..extract.questions import read_lines, read_questions
        from ..extract.served_target import chat_request, served_path
        from ..train.serve_check.check import TargetSide, serve_check

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


def report() -> click.Command:
    def run(folders: tuple[str, ...], html: bool, png: bool, out: str | None) -> None:
        from ..train.report.report import report

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
