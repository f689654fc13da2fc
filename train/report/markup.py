"""Small pieces of HTML. Every text that goes in is escaped here; what comes out is markup."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

LONG = 24  # characters, from which on a cell may be cut and tells its text when pointed at
LEFT_CLASS, RIGHT_CLASS = "", ' class="n"'


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: its text, a number to sort by where it is not its own, perhaps a link to an anchor of the page."""

    text: str
    sort: float | str | None = None
    link: str | None = None

    def html(self, placed: str) -> str:
        text = escape(self.text)
        if self.link is not None:
            text = f'<a href="#{escape(self.link)}">{text}</a>'
        by = "" if self.sort is None else f' data-v="{escape(str(self.sort))}"'
        whole = f' title="{escape(self.text)}"' if len(self.text) > LONG else ""
        return f"<td{placed}{by}{whole}>{text}</td>"


def table(
    head: Sequence[str], rows: Iterable[Sequence[Cell | str]], *, numbers: Iterable[int] = (), is_sortable: bool = False
) -> str:
    """A table; `numbers` are the columns of numbers, on the right."""
    right = set(numbers)
    placed = [RIGHT_CLASS if i in right else LEFT_CLASS for i in range(len(head))]
    heads = "".join(f'<th scope="col"{place}>{escape(text)}</th>' for text, place in zip(head, placed))
    body = "\n".join(row_html(row, placed) for row in rows)
    kind = ' class="sortable"' if is_sortable else ""
    return f'<div class="scroll"><table{kind}>\n<thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody>\n</table></div>'


def row_html(row: Sequence[Cell | str], placed: Sequence[str]) -> str:
    cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
    return f"<tr>{''.join(cell.html(place) for cell, place in zip(cells, placed))}</tr>"


def facts(pairs: Mapping[str, str]) -> str:
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs.items())
    return f"<dl>{terms}</dl>"


def pre(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f"<pre>{escape(text)}</pre>"


def notes(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f'<div class="notes">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'
