"""Base class of errors that a user can fix: the command line prints only their text; all others keep their traceback."""

import re


class UserError(ValueError):
    """A wrong setting, file or argument. The text names the value, the rule it breaks and the way out."""


def brief(error: BaseException) -> str:
    """Returns the first sentence of an error's text, on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?]) ", text)[0].rstrip(".:")[:300]
