"""One base for the errors that a user can mend: the command line prints their text alone; all others keep their traceback."""


class UserError(ValueError):
    """A wrong setting, file or argument. The text names the value, the rule it breaks and the way out."""
