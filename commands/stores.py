"""The commands that look at a store, or at any folder of ours, and make one of another; rooms are imported late."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from .. import UserError
from ..options import made, resolved

PNG_MARK = b"\x89PNG\r\n\x1a\n"


def verify() -> click.Command:
    def run(store: str, workers: int | None, is_repaired: bool) -> None:
        from ..store.integrity import verify
        from ..store.repair import advice_for, lock_for_repair, repair
        from ..store.summary import faults_text, verify_text

        with lock_for_repair(Path(store)) if is_repaired else nullcontext():
            report = verify(Path(store), workers=workers)
            click.echo(verify_text(report))
            if not report.faults:
                return
            advice = advice_for(Path(store), report)
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
            from ..train.summary import describe_run, describe_sweep

            if png is not None:
                raise UserError(
                    f"--png {png} with the {kind} {folder!r}", "a store", f"see the pictures in the {kind}'s folder"
                )
            click.echo(describe_run(path) if kind == "run" else describe_sweep(path))
        else:
            from ..store.manifest import MANIFEST_NAME
            from ..store.summary import describe_store, plot_store, read_facts

            if not (path / MANIFEST_NAME).exists():
                raise UserError(
                    f"no store, run or sweep at {folder!r}",
                    f"a folder that holds {MANIFEST_NAME}, run.json or sweep.json",
                    "check the path",
                )
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
    from ..store.files import NewFile

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


def recode() -> click.Command:
    from ..store.config import RecodeConfig

    def run(stores: tuple[str, ...], **given: Any) -> None:
        from ..store.recode import recode

        click.echo(recode(resolved(RecodeConfig, "recode", given), stores).text())

    return made("recode", run, RecodeConfig, [click.Argument(["stores"], nargs=-1, required=True, metavar="STORE...")])
