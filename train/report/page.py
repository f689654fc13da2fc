"""The page of a run, or of several: one file of HTML with its style, script and charts inside."""

from html import escape

from ... import __version__
from .compare_html import comparison_sections
from .look import SCRIPT, STYLE, policy
from .markup import facts, notes
from .run_folder import RunFolder
from .run_html import links, run_sections, state_mark
from .svg import MOST_POINTS
from .sweep_folder import Comparison, Entry

FIRST_LINE = "<!doctype html>"
OPEN_RUNS = 3  # so many runs of a comparison are shown unfolded
POINTS_OF_MANY = 300  # of a curve where a page holds many runs


def run_page(run: RunFolder) -> str:
    """The page of one run."""
    head = (
        f'<h1>{escape(run.name)}{state_mark(run.state)}</h1>\n<p class="path">{escape(str(run.run_dir))}</p>\n{links()}'
    )
    return framed(run.name, f"{head}\n{run_sections(run, '', 2, MOST_POINTS)}")


def comparison_page(comparison: Comparison) -> str:
    """The page of a sweep, or of several runs."""
    several = len(comparison.entries) > OPEN_RUNS
    most_points = POINTS_OF_MANY if several else MOST_POINTS
    body = [
        f'<h1>{escape(comparison.title)}</h1>\n<p class="path">{escape(comparison.path)}</p>',
        '<nav><a href="#ranking">Ranking</a><a href="#overlaid">Curves</a><a href="#runs">Runs</a></nav>',
        notes(comparison.notes),
        facts(comparison.facts) if comparison.facts else "",
        comparison_sections(comparison),
        '<h2 id="runs">Runs</h2>',
        *(entry_section(entry, not several, most_points) for entry in comparison.entries),
    ]
    return framed(comparison.title, "\n".join(body))


def entry_section(entry: Entry, is_open: bool, most_points: int) -> str:
    """One run of a comparison, which unfolds."""
    if entry.run is None:
        content = f"<p>{escape(entry.error or 'Its folder is not there yet.')}</p>"
    else:
        content = run_sections(entry.run, f"{entry.anchor}-", 3, most_points)
    return (
        f'<details class="run" id="{escape(entry.anchor)}"{" open" if is_open else ""}><summary>{escape(entry.title)}'
        f"{state_mark(entry.state)}</summary>\n{content}\n</details>"
    )


def framed(title: str, body: str) -> str:
    return f"""{FIRST_LINE}
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
<footer>Made by dflash-offline {escape(__version__)}. This page loads nothing: it can be copied and sent.</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""
