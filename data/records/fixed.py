"""Fixed: what makes the text of a template, and the tokens of a text, the same on every day and by
every call.

Templates may ask for the time of the rendering (`strftime_now`), which a date pins, and draw by
chance; so may tokenizers.
"""

import datetime
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from longctx.data.records.tokenizer import Tokenizer, TokenizerError
from longctx.errors import UserError

ASKS_THE_DAY = "strftime_now"
"""Function of transformers that gives templates the time of the rendering, in a format."""
UNPINNED = "the day is not pinned"
_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ"
_SHORT = "dmHIMSjkley"
_CHANCE = ("random", "lipsum")
_PLACE = " at 0x"
_OBJECT = re.compile(rf"<[^<>]*{_PLACE}[0-9a-f]+>")


class TemplateError(UserError):
    """A chat template that gives another text on another day, or by chance."""


def parsed_date(date: str) -> datetime.date:
    """Returns a date. Raises TemplateError if it is none."""
    wrong = TemplateError(f"the date is {date!r}: it must be YEAR-MONTH-DAY, such as 2026-01-31")
    try:
        parsed = datetime.date.fromisoformat(date)
    except (ValueError, TypeError) as error:
        raise wrong from error
    if parsed.isoformat() != date:  # another way to write it
        raise wrong
    return parsed


def with_day(template: str, date: str | None) -> str:
    """Returns a template for which it is always midnight of the date; None: it is refused where it
    asks for the time.

    Its first line is a macro of the name of the function.
    """
    if ASKS_THE_DAY not in template:
        return template
    if date is None:
        return (
            f"{{%- macro {ASKS_THE_DAY}(format) %}}{{{{ raise_exception({UNPINNED!r}) }}}}{{% "
            f"endmacro -%}}\n{template}"
        )
    midnight = datetime.datetime.combine(parsed_date(date), datetime.time())
    codes = [f"%{letter}" for letter in _DIRECTIVES] + [f"%-{letter}" for letter in _SHORT]
    values = {code: midnight.strftime(code) for code in codes}
    macro = (
        f"{{%- macro {ASKS_THE_DAY}(format) %}}{{% set day = namespace(text=format) %}}{{% for "
        f"code, value in {values!r}.items() %}}{{% set day.text = day.text.replace(code, value) "
        "%}{% endfor %}{% if '%' in day.text %}{{ raise_exception('the format ' ~ format ~ "
        "' of the time is not known') }}{% endif %}{{ day.text }}{% endmacro -%}\n"
    )
    return macro + template


def unpinned() -> TemplateError:
    """Returns the error of a template that asks for the day where none is pinned."""
    return TemplateError(
        f"the chat template asks for the day ({ASKS_THE_DAY}), by which the store would differ "
        "tomorrow: give the day that conversations shall have (--date YEAR-MONTH-DAY), or set the "
        "variable that the template takes for it, if it has one (--template-set date_string=..)"
    )


def check_chance(template: str, environment: Any) -> None:
    """Raises TemplateError for a template that draws by chance. What is no Jinja is refused where
    it is rendered."""
    import jinja2

    try:
        tree = environment.parse(template)
    except jinja2.TemplateError:
        return
    for name in _names(tree):
        if name in _CHANCE:
            raise TemplateError(
                f"the chat template draws by chance ({name}): remove that from a copy of it "
                "(--chat-template FILE)"
            )


def _names(tree: Any) -> Iterator[str]:
    """Yields the filters and global functions of a template; a filter may also be named as a text:
    map('random')."""
    from jinja2 import nodes

    for each in tree.find_all(nodes.Filter):
        yield each.name
        for argument in each.args:
            if each.name == "map" and isinstance(argument, nodes.Const):
                yield str(argument.value)
    for called in tree.find_all(nodes.Call):
        if isinstance(called.node, nodes.Name) and called.node.name == "lipsum":
            yield called.node.name


def check_places(rendered: str, said: Iterable[str]) -> None:
    """Raises TemplateError for a rendering with the place of an object in memory that no text of
    the conversation has."""
    if _PLACE not in rendered:
        return
    texts = list(said)
    for found in _OBJECT.findall(rendered):
        if not any(found in text for text in texts):
            raise TemplateError(
                f"the chat template prints {found}, an object of Python that is elsewhere in each "
                "process: correct the template (--chat-template FILE)"
            )


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises TokenizerError for a BPE that leaves out merges by chance: each call would give a text
    other tokens.

    A tokenizer.json says nothing of the sampling of Unigram.
    """
    dropout = json.loads(tokenizer.text)["model"].get("dropout")
    if dropout:
        raise TokenizerError(
            f"the tokenizer draws by chance (dropout is {dropout} in the model of its "
            "tokenizer.json), so each preparation would give other tokens: set dropout to null "
            "there"
        )
