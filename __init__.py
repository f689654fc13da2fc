"""dflash-offline: trains DFlash drafters from the recorded hidden states of a frozen target.

This file knows the version and the one error that users see, nothing else.
"""

__version__ = "0.1.0"


class UserError(Exception):
    """What a user can fix, in three lines: what happened, what was expected, what to do.

    Each argument is one sentence and holds the value it speaks of. The command line prints
    the three lines without a traceback and exits with 1.
    """

    def __init__(self, happened: str, expected: str, advice: str) -> None:
        super().__init__(happened, expected, advice)
        self.happened = happened
        self.expected = expected
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.happened}\nexpected: {self.expected}\nto do: {self.advice}"
