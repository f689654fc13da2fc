"""Whether all answers come from one model, by the name that replies give it.

That name may be another than the one asked for: some servers resolve aliases. It must be the same in every reply,
whichever endpoint gives it and however often the run was interrupted. Replies without a name say nothing.
"""

from ... import UserError
from ...progress import say
from .endpoints import Endpoint
from .journal import Journal


class ServedModel:
    """The name in the replies, None until one came. `known`: the name in those of an earlier start."""

    def __init__(self, asked: str, known: str | None) -> None:
        self.asked = asked
        self.name = known

    def compare(self, endpoint: Endpoint, said: str | None) -> None:
        """Raises UserError where a reply names another model than the replies before it."""
        if said is None or said == self.name:
            return
        if self.name is not None:
            raise UserError(
                f"{endpoint.url} answers with another model: its reply names {said!r}, those before named "
                f"{self.name!r}",
                "answers of one model, whichever server gives them",
                "serve one model at every endpoint, then give the same command again; what was answered is safe",
            )
        self.name = said
        if said != self.asked:
            say(f"{endpoint.url} answers as model {said!r} where {self.asked!r} is asked for")


def name_in(journal: Journal) -> str | None:
    """The name that the replies of earlier starts gave their model."""
    answered = (record for outcome, record in journal.records() if outcome == "answered")
    return next((name for record in answered for name in record.get("said", {}).values()), None)
