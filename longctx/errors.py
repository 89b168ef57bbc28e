"""Base class of errors that a user can fix: the command line prints only their text; all others
keep their traceback."""

import re
import shlex
from collections.abc import Callable, Iterable

LONGEST_MESSAGE = 3500
"""Characters of a printed message; longer ones lose their middle."""


class UserError(ValueError):
    """A wrong setting, file or argument. The text names the value, the rule it breaks and the way
    out."""

    def __str__(self) -> str:
        return shortened(super().__str__(), LONGEST_MESSAGE)


def raise_together(checks: Iterable[Callable[[], object]]) -> None:
    """Runs checks that do not need each other. Raises the UserError of the one that fails, or one
    error of all that fail."""
    found = list[UserError]()
    for check in checks:
        try:
            check()
        except UserError as error:
            found.append(error)
    if len(found) > 1:
        raise UserError("\n".join([f"{len(found)} problems:", *(f"  {error}" for error in found)]))
    if found:
        raise found[0]


def install(extra: str) -> str:
    """Returns the command that installs an extra. It names no distribution: `longctx` on the
    registry is another program."""
    return f"pip install '.[{extra}]' in the folder of longctx's source code"


def brief(error: BaseException) -> str:
    """Returns the first sentence of an error's text, on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?]) ", text)[0].rstrip(".:")[:300]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type without one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def shortened(text: str, most: int) -> str:
    """Returns a text of about `most` characters at most, without its middle if it is longer.

    Control characters and others that cannot be printed are escaped: a value from a file must not
    reach the terminal as such.
    """
    if len(text) > most:
        end = most // 3
        text = f"{text[: most - end]}[.. {len(text) - most:,} characters ..]{text[-end:]}"
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def shell(*words: object) -> str:
    """Returns words of a command as a shell takes them, for commands in messages."""
    return shlex.join(map(str, words))
