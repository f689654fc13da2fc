"""Do a template's own generation tags say the same as our rule?

A template may mark what the target writes (`{% generation %}`). Real ones differ where nothing is at stake: the end
mark, the header, an empty thought, the words around a thought may stand inside or outside. What must agree is what
the message itself holds: its thought, its content, its calls.
"""

from ..lines.inputs import LeftOut
from ..lines.shapes import Message
from .templates import Span, thought_of


def check_marks(
    message: Message, whole: str, spans: list[Span], start: int, earliest: int, closings: tuple[str, ...]
) -> None:
    """Raises LeftOut where the tags leave the turn out, or cut it elsewhere than its answer begins and ends.

    The answer stands in whole[start:], and after it one of the closings; its header, which tags may cover as
    well, begins at `earliest`.
    """
    ended = whole.rstrip()
    stop = next((len(ended[: -len(text)].rstrip()) for text in closings if text and ended.endswith(text)), len(ended))
    inside = [(max(a, start), min(b, stop)) for a, b in spans if b > start and a < stop]
    if not any(whole[a:b].strip() for a, b in inside):
        raise LeftOut("not marked by the template", f"no generation tag covers {whole[start : start + 40]!r}")
    if any(a < earliest and b > start for a, b in spans):
        raise LeftOut("generation marks disagree", "a tag opens before the turn does")
    for own_start, own_stop in own_stretches(message, whole, start, stop):
        if missed := uncovered(whole, inside, own_start, own_stop):
            raise LeftOut("generation marks disagree", f"outside the tags: {missed[:80]!r}")


def own_stretches(message: Message, whole: str, start: int, stop: int) -> list[Span]:
    """Where the message's thought and content stand; the whole answer where that cannot be told."""
    found, at = [], start
    parts = [part for part in (thought_of(message).strip(), message["content"].strip()) if part]
    for part in parts:
        place = whole.find(part, at, stop)
        if place < 0:
            return [(start, stop)]
        found.append((place, place + len(part)))
        at = place + len(part)
    return [*found, (at, stop)] if message.get("tool_calls") else found


def uncovered(whole: str, spans: list[Span], start: int, stop: int) -> str:
    """The first text of whole[start:stop] that no span covers, blanks aside."""
    at = start
    for a, b in [*sorted(spans), (stop, stop)]:
        if b <= at:
            continue
        if missed := whole[at : min(a, stop)].strip():
            return missed
        at = max(at, b)
        if at >= stop:
            break
    return ""
