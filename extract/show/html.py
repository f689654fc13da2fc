"""Samples for a person to look at in a browser: one file that loads nothing and runs nothing.

Every token tells its place, its id and its text when pointed at. Whatever a sample holds is escaped, and the file
forbids scripts and anything from outside besides.
"""

import os
from html import escape
from pathlib import Path

from ... import UserError
from ...store.files import NewFile, publish
from .samples import Shown, ShownSample, open_shown
from .tokens import LINE_END, TAB, Piece, Run, ends_of, one_line, runs_of, text_of, visible

MOST_RUN_TOKENS = 4000  # of neighbouring tokens that are all trained on, or all not; the middle of more is left out
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1c1f23; --dim: #5c6570; --line: #d5dae0; --panel: #f5f7f9;
  --trained: #bfe8c8; --mark: #1f5a94; --edge: #8a939e; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --text: #e3e6ea; --dim: #9aa4af; --line: #333a42;
  --panel: #1d2126; --trained: #1f5c34; --mark: #8ec3f5; --edge: #77818c; } }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .5rem; } h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
section { margin: 1.5rem 0; padding: 1rem; border: 1px solid var(--line); border-radius: 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 0 .8rem; font-size: .88rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 0; padding: .8rem; background: var(--panel); border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: plaintext; font: 13px/1.65 ui-monospace, "DejaVu Sans Mono", monospace; }
mark { background: var(--trained); color: inherit; print-color-adjust: exact; }
b { color: var(--mark); font-weight: 600; }
u { text-decoration: underline dotted var(--edge); text-underline-offset: 3px; }
pre span:hover, pre b:hover { outline: 2px solid var(--edge); }
#edges:checked ~ main pre :is(span, b) { box-shadow: -1px 0 0 var(--edge); }
i { color: var(--dim); font-style: normal; }
.legend pre { display: inline; padding: .1rem .4rem; } label, .legend { font-size: .9rem; color: var(--dim); }
"""
FIRST_LINE = "<!doctype html>"
LEGEND = (
    "<mark><span>trained on</span></mark>|what the drafter learns to say",
    "<b>&lt;|mark|&gt;</b>|one token that the tokenizer was given beside its vocabulary, as templates use them",
    "<u><span>tail</span></u>|after the last anchor: no state is recorded of it",
    f"<span>{LINE_END}</span>|a line end; {TAB} is a tab",
    "<span>&lt;0xF0&gt;</span>|a byte of half a character",
    "<span>&lt;U+202E&gt;</span>|a character that is not shown as it is",
)


def require_page_path(path: Path, folder: Path) -> None:
    """Raises UserError unless a page may and can be written here once DATA is in `folder`. Tries it, leaves nothing.

    A file that is there must be a page itself; the folder must be there, or be the one that DATA will be in.
    """
    if path.absolute() == folder.absolute() or path.is_dir():
        raise UserError(f"--html {str(path)!r} is a folder", "a file for the page", "name a file, like samples.html")
    if os.path.lexists(path) and not is_page(path):
        raise UserError(
            f"--html {str(path)!r} is there and is no page", "a new file, or an earlier page", "name another file"
        )
    if path.parent.is_dir():
        NewFile(path).abort()
    elif path.parent.absolute() != folder.absolute():
        raise UserError(
            f"--html {str(path)!r}: its folder is not there", "a folder that is there", "make it, or name another file"
        )


def is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE.encode()


def show_html(folder: Path, count: int, path: Path) -> None:
    """Writes `count` samples of a complete DATA folder, or all of a smaller one, to a file that appears whole.

    Raises UserError as `show` and `require_page_path` do.
    """
    require_page_path(path, folder)
    shown = open_shown(folder, count)
    sections = [section(shown, sample, number) for number, sample in enumerate(shown.samples(), start=1)]
    publish(path, "\n".join([page_head(shown), *sections, "</main>\n</body>\n</html>\n"]).encode())


def page_head(shown: Shown) -> str:
    """All up to the first sample: the rules against loading anything, the style, the facts and the legend."""
    title = escape(shown.title)
    target = escape(one_line(visible(str(shown.data.facts["target"]))))
    terms = "".join(
        f"<dt><pre>{example}</pre></dt><dd>{meaning}</dd>" for example, meaning in (t.rsplit("|", 1) for t in LEGEND)
    )
    return f"""{FIRST_LINE}
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>Prepared for target {target}. Point at a token for its place, its id and its text.</p>
<dl class="legend">{terms}</dl>
<input type="checkbox" id="edges"><label for="edges"> show where tokens begin</label>
<main>"""


def section(shown: Shown, sample: ShownSample, number: int) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in shown.facts(sample).items())
    body = "".join(run_html(run, sample.num_recorded) for run in runs_of(sample.pieces))
    return (
        f"<section>\n<h2>Sample {number} of {len(shown.rows)}: row {sample.row:,}</h2>\n"
        f"<dl>{facts}</dl>\n<pre>{body}</pre>\n</section>"
    )


def run_html(run: Run, num_recorded: int) -> str:
    """A run's tokens, one element each, inside <mark> where they are trained on."""
    head, left_out, tail = ends_of(run, MOST_RUN_TOKENS)
    body = pieces_html(head, num_recorded)
    if left_out:
        trained = "all trained on" if run.is_trained else "none trained on"
        body += f"\n<i>... {left_out:,} tokens, {trained}, are not shown ...</i>\n{pieces_html(tail, num_recorded)}"
    return f"<mark>{body}</mark>" if run.is_trained else body


def pieces_html(pieces: tuple[Piece, ...], num_recorded: int) -> str:
    elements = []
    for number, piece in enumerate(pieces):
        text = escape(piece.text if number else text_of([piece]))
        name = "b" if piece.is_mark else "span"
        element = f'<{name} title="{title(piece)}">{text}</{name}>'
        elements.append(f"<u>{element}</u>" if piece.first >= num_recorded else element)
    return "".join(elements)


def title(piece: Piece) -> str:
    """Place, id and text of a token, or of the tokens that are one character together."""
    last = piece.first + len(piece.ids) - 1
    places = f"{piece.first:,}" if last == piece.first else f"{piece.first:,}-{last:,}"
    kind = "trained on" if piece.is_trained else "not trained on"
    ids = " ".join(map(str, piece.ids))
    return escape(f'token {places}, id {ids}, {kind}: "{one_line(piece.text)}"')
