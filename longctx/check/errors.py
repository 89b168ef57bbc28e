"""Errors of the check, which a command prints without a traceback."""


class UsageError(ValueError):
    """An argument that is wrong: exit status 2."""


class CheckError(ValueError):
    """A step that cannot be judged: exit status 3."""
