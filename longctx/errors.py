"""One base for the errors that a user can mend: the command line prints their text alone; all others keep their traceback."""

import re


class UserError(ValueError):
    """A wrong setting, file or argument. The text names the value, the rule it breaks and the way out."""


def brief(error: BaseException) -> str:
    """The first sentence of what a library says, on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?]) ", text)[0].rstrip(".:")[:300]
