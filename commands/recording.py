"""The commands from chats to a filled store; a room is imported when its command runs."""

from pathlib import Path
from typing import Any

import click

from ..options import made, resolved

SAMPLES_IN_HTML = 20


def prepare() -> click.Command:
    from ..extract.config import PrepareConfig

    def run(chats: tuple[str, ...], **given: Any) -> None:
        from ..extract.prepare import prepare
        from ..extract.show.html import require_page_path, show_html

        config = resolved(PrepareConfig, "prepare", given)
        if config.html is not None:
            require_page_path(Path(config.html), Path(config.out))
        click.echo(prepare(config, chats).text())
        if config.show:
            from ..extract.show.show import show

            click.echo("\n" + show(Path(config.out), config.show), color=True)
        if config.html is not None:
            show_html(Path(config.out), config.show or SAMPLES_IN_HTML, Path(config.html))
            click.echo(f"samples to look at in {config.html}")

    chats = click.Argument(["chats"], nargs=-1, required=True)
    return made("prepare", run, PrepareConfig, [chats])


def regenerate() -> click.Command:
    from ..extract.regenerate.config import RegenerateConfig

    def run(chats: tuple[str, ...], **given: Any) -> None:
        from ..extract.regenerate.run import regenerate

        click.echo(regenerate(resolved(RegenerateConfig, "regenerate", given), chats).text())

    chats = click.Argument(["chats"], nargs=-1, required=True)
    return made("regenerate", run, RegenerateConfig, [chats])


def plan() -> click.Command:
    from ..extract.config import PlanConfig

    def run(**given: Any) -> None:
        from ..extract.foretell import plan_command

        click.echo(plan_command(resolved(PlanConfig, "extract", given)).text())

    return made("plan", run, PlanConfig)


def extract() -> click.Command:
    from ..extract.config import ExtractConfig

    def run(**given: Any) -> None:
        from ..extract.launch import extract

        click.echo(extract(resolved(ExtractConfig, "extract", given)).text())

    return made("extract", run, ExtractConfig)
