"""dflash-offline: trains DFlash drafters from the recorded hidden states of a frozen target.

This file knows the version, the one error that users see and the words for one of the system, nothing else.
"""

import errno

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


def errno_name(error: OSError) -> str:
    """The name of an error's number, like ENOSPC."""
    return errno.errorcode.get(error.errno or 0, "unknown error")


def system_reason(error: OSError) -> str:
    """What the operating system says of its error, on one line: No space left on device (ENOSPC)."""
    return f"{' '.join(str(error.strerror or error).split()) or type(error).__name__} ({errno_name(error)})"
