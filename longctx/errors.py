"""The one base of all errors that a user can mend: the command line prints their text alone, every other error keeps its traceback."""


class UserError(ValueError):
    """A wrong setting, file or argument. The text names the value, the rule it breaks and the way out."""
