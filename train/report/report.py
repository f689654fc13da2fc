"""The command `dflash report`: reads runs or a sweep, writes the page and the pictures."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import UserError
from ...store.files import NewFile, publish
from .chart import Chart
from .compare_series import effect_charts, overlay_charts
from .page import FIRST_LINE, comparison_page, run_page
from .run_folder import RunFolder, read_run
from .series import run_charts
from .sweep_folder import Comparison, is_sweep, read_comparison, read_runs

PAGE_NAME, PICTURE_ENDING = "report.html", ".png"


@dataclass(frozen=True, slots=True)
class Written:
    """What `dflash report` wrote, and what it noticed."""

    page: Path | None
    pictures: tuple[Path, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        lines = [f"note       {note}" for note in self.notes]
        if self.page is not None:
            lines.append(f"page       {self.page}")
        return "\n".join([*lines, *(f"picture    {path}" for path in self.pictures)])


def report(folders: Sequence[Path], out: Path | None, *, has_page: bool, has_pictures: bool) -> Written:
    """Writes a page, pictures or both of one run, one sweep, or several runs side by side.

    The page is `out`, else report.html in the one folder, or here for several runs; the pictures lie in a folder beside
    it that is named like it. Raises UserError for folders that are neither, and where nothing can be written.
    """
    if not (has_page or has_pictures):
        raise UserError(
            "report was asked for neither a page nor pictures",
            "--html for a page, --png for pictures, or both",
            f"`dflash inspect {shlex.quote(str(folders[0]))}` prints a run as text",
        )
    path = out or (folders[0] / PAGE_NAME if len(folders) == 1 else Path(PAGE_NAME))
    shown = read(folders)
    if has_pictures:
        require_pictures(pictures_dir(path))
    if has_page:
        require_page(path)
        page = comparison_page(shown) if isinstance(shown, Comparison) else run_page(shown)
        publish(path, page.encode("utf-8", errors="replace"))
    pictures: list[Path] = []
    if has_pictures:
        from ..plots import save_charts  # here: matplotlib takes a second, and a page needs none

        pictures = save_charts(charts_of(shown), pictures_dir(path))
    return Written(path if has_page else None, tuple(pictures), tuple(shown.notes))


def read(folders: Sequence[Path]) -> RunFolder | Comparison:
    """The one run, the one sweep, or the runs. Raises UserError for a sweep among several folders."""
    sweeps = [folder for folder in folders if is_sweep(folder)]
    if sweeps and len(folders) > 1:
        raise UserError(
            f"{str(sweeps[0])!r} is a sweep, given beside {len(folders) - 1} other folders",
            "one sweep, or any number of runs",
            "name the runs of the sweep (its folder runs/) to compare them with others",
        )
    if sweeps:
        return read_comparison(sweeps[0])
    return read_run(folders[0]) if len(folders) == 1 else read_runs(folders)


def charts_of(shown: RunFolder | Comparison) -> list[Chart]:
    """The charts that become pictures."""
    if isinstance(shown, RunFolder):
        return run_charts(shown.metrics, shown.evaluations)
    return [*overlay_charts(shown.entries), *effect_charts(shown)]


def pictures_dir(path: Path) -> Path:
    """The folder of the pictures beside a page."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-pictures")


def require_pictures(folder: Path) -> None:
    """Raises UserError where something other than pictures lies in their folder: a run, a store, an export."""
    expected, advice = "a new folder, or one of earlier pictures", "name another page with --out"
    told = f"the pictures would go into {str(folder)!r}, which"
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise UserError(f"{told} is no folder", expected, advice)
        return
    strange = sorted(path.name for path in folder.iterdir() if not is_picture(path.name))
    if strange:
        raise UserError(f"{told} holds {strange[0]!r}", expected, advice)


def is_picture(name: str) -> bool:
    """A picture, also one whose writing was cut off."""
    return name.endswith(PICTURE_ENDING) or f"{PICTURE_ENDING}.tmp." in name


def require_page(path: Path) -> None:
    """Raises UserError unless a page may and can be written here; a file that is there must be a page itself."""
    expected, advice = "a new file, or an earlier page", "name another file with --out"
    if path.is_dir():
        raise UserError(f"--out {str(path)!r} is a folder", "a file for the page", "name a file, like report.html")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(FIRST_LINE)) != FIRST_LINE.encode():
                raise UserError(f"--out {str(path)!r} is there and is no page", expected, advice)
    NewFile(path).abort()
