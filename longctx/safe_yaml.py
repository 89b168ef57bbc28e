"""YAML of settings and hardware profiles: plain data, numbers as in JSON, no duplicate keys, one
error for all mistakes."""

import re
from pathlib import Path
from typing import Any

import yaml

from longctx.errors import UserError, shortened

_REPLACED = ("timestamp", "int", "float")
"""Types of YAML 1.1 that are recognised in other ways here: 010 was 8, 1:30 was 90, and a date no
text."""
_TEXT = re.compile("[^\0\ud800-\udfff]*")
MOST_VALUES = 100_000
DEEPEST = 50


class YamlError(UserError):
    """Text that is not YAML of plain data: what is wrong, and where."""


class SafeLoader(yaml.SafeLoader):
    """Safe YAML with whole numbers and text as keys.

    `3e-4` is a number, as in YAML 1.2, and dates are text. A key given twice is refused rather than
    overwritten.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # as in PyYAML
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.removeprefix("tag:yaml.org,2002:") not in _REPLACED
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_document(self, node: yaml.Node) -> Any:
        _check_size(node)
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            ArithmeticError,
        ) as error:  # of values that contradict their tag
            mistake = f"is not a valid {node.tag.removeprefix('tag:yaml.org,2002:')}"
            raise self._refused(node, mistake) from error
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise self._refused(node, "is a number of more than 64 bits")
        if isinstance(value, str) and not _TEXT.fullmatch(value):
            raise self._refused(
                node, "has characters that are not text (NUL, or half of a surrogate pair)"
            )
        return value

    def _refused(self, node: yaml.Node, mistake: str) -> yaml.constructor.ConstructorError:
        text = f"{shortened(str(node.value), 60)} {mistake}"
        return yaml.constructor.ConstructorError(None, None, text, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode):
                mistake = "a key must be text or a number, not a list or mapping"
                raise yaml.constructor.ConstructorError(None, None, mistake, key_node.start_mark)
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            # Such as `on` and 1.5, which are text where a name is expected.
            if key_node.tag != "tag:yaml.org,2002:int":
                key_node.tag = "tag:yaml.org,2002:str"
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                mistake = f"key {shortened(str(key), 60)!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, mistake, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


SafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789")
)
SafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def parse(text: str) -> Any:
    """Returns the value of a text. Raises YamlError with line and column, for whatever is wrong
    with it."""
    try:
        return yaml.load(text, SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        mistake = ", ".join(filter(None, (error.context, error.problem)))
        hint = "; indent with spaces instead of tabs" if "'\\t'" in mistake else ""
        raise YamlError(f"{where}{shortened(mistake, 300)}{hint}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(
            f"line {line}: character U+{int(error.character):04X} is not allowed: remove it"
        ) from error
    except RecursionError as error:
        raise YamlError(f"lists and mappings are nested more than {DEEPEST} levels deep") from error
    except (
        OverflowError,
        ValueError,
    ) as error:  # of PyYAML itself: an escape beyond Unicode, a version of thousands of digits
        raise YamlError(
            f"an escape such as \\U or a directive has a number that is too large ({error})"
        ) from error


def read_text(path: Path) -> str:
    """Returns the content of a UTF-8 file, without a byte order mark. Raises YamlError if it is not
    UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlError(f"byte {error.start} is not UTF-8 text: save the file as UTF-8") from error
    except ValueError as error:
        raise YamlError(f"{str(path)!r} is not a path: {error}") from error


def _check_size(node: yaml.Node, depth: int = 0, counted: list[int] | None = None) -> None:
    """Raises ConstructorError for nesting without end, and for aliases that expand to very many
    values."""
    counted = [0] if counted is None else counted
    counted[0] += 1
    if depth > DEEPEST or counted[0] > MOST_VALUES:
        if depth > DEEPEST:
            mistake = f"more than {DEEPEST} levels of nesting"
        else:
            mistake = f"more than {MOST_VALUES:,} values"
        raise yaml.constructor.ConstructorError(
            None, None, f"{mistake}, aliases included", node.start_mark
        )
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                _check_size(part, depth + 1, counted)
