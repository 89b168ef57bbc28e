"""Nulls: members of objects that only a table has added, as other records have them, and what else
Arrow changes in values.

A table gives every object at one place of its records (the arguments of all calls, say) the members
of all of them, null where a record does not have them. A null that the record itself says stays:

- in a table of Arrow, a null is added if its column has a type, so that some record has, or may
  have, a value there;
- in JSON, also as text in a column, it is added if all objects at each place have the same keys, in
  all records of the file, and one of them, also in another such file, has a value for this key.
  Where people or programs wrote the objects, keys differ: a question calls no tool.

Whatever wrote it, a null is no property of a tool, and no argument that the called tool does not
have: these are left out, too. All that are left out, and all that stay in tools and arguments, are
counted. Null elements of lists, and texts in JSON within messages (such as arguments of calls),
stay as they are. A null member of a message itself says nothing, and is ignored wherever it stands.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from longctx.data.records.chat import Message
from longctx.data.records.messages import listed, parse_json
from longctx.errors import UserError

TOOLS = ("tools", "functions")
MESSAGES = ("messages", "conversations", "prompt", "completion", "query", "response")
"""Columns of messages, whose own null members say nothing; some may be texts."""
COLUMNS = (*TOOLS, *MESSAGES)


# --- tables of Arrow


Convert = Callable[[Any, Counter[str]], Any]
"""Converts a value, and counts what it leaves out by column."""


def rows(batch: Any) -> Iterator[tuple[dict[str, Any], Mapping[str, int]]]:
    """Yields the values of each row of a batch of Arrow, and by column how many null members are
    left out.

    Values of the type Json are decoded, and maps are objects. Raises FormatError for what is not
    JSON.
    """
    converters = {column.name: _converter(column.type, column.name, 0) for column in batch.schema}
    changed = {name: convert for name, convert in converters.items() if convert is not None}
    for row in batch.to_pylist():
        added = Counter[str]()
        for name, convert in changed.items():
            if row[name] is not None:
                row[name] = convert(row[name], added)
        yield row, added


def _converter(kind: Any, column: str, depth: int) -> Convert | None:
    """Returns what converts values of a type of Arrow in a column; None: they stay. `depth`:
    objects that contain them."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, getattr(pyarrow, "JsonType", ())):
        return lambda value, added: parse_json(value)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _converter(kind.storage_type, column, depth)
    if types.is_struct(kind):
        return _of_objects(kind, column, depth)
    if types.is_map(kind):
        convert = _converter(kind.item_type, column, depth + 1)
        return lambda value, added: {key: _converted(item, convert, added) for key, item in value}
    inner = _converter(kind.value_type, column, depth) if hasattr(kind, "value_type") else None
    if inner is None:
        return None
    return lambda value, added: [_converted(item, inner, added) for item in value]


def _converted(value: Any, convert: Convert | None, added: Counter[str]) -> Any:
    if value is None or convert is None:
        return value
    return convert(value, added)


def _of_objects(kind: Any, column: str, depth: int) -> Convert:
    from pyarrow import types

    counts = column in TOOLS or (column in MESSAGES and depth)
    converters = {each.name: _converter(each.type, column, depth + 1) for each in kind}
    said = {each.name for each in kind if types.is_null(each.type)}

    def convert(value: dict[str, Any], added: Counter[str]) -> dict[str, Any]:
        members = {}
        for key, member in value.items():
            if member is not None or key in said:
                members[key] = _converted(member, converters[key], added)
            elif counts:
                added[column] += 1
        return members

    return convert


# --- JSON


@dataclass
class _Place:
    """What objects at one place have in common.

    Attributes:
        keys: keys of each object; None: there is no object yet.
        given: keys that have a value in one of them.
        within: places of their members, and of the elements of lists, by key; those of lists by "".
    """

    keys: frozenset[str] | None = None
    given: set[str] = field(default_factory=set)
    within: dict[str, "_Place"] = field(default_factory=dict)


class AddedMembers:
    """Null members that a table has added to the JSON of a file, as its records show, and those of
    files of the same table.

    `together`: the objects of all columns are of one table, or of none.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]], *, together: bool) -> None:
        self._columns = {name: _Place() for name in COLUMNS}
        try:
            self._look_at(records, together)
        except RecursionError:  # of a record that is refused where it is read
            self._columns = {}

    def _look_at(self, records: Iterable[Mapping[str, Any]], together: bool) -> None:
        """Drops the columns that no table wrote."""
        objects = set[str]()
        for record in records:
            for name in COLUMNS & self._columns.keys() & record.keys():
                if not isinstance(record[name], str):
                    objects.add(name)
                if not _see(_parsed(name, record[name]), self._columns[name]):
                    del self._columns[name]
            if together and not objects <= self._columns.keys():
                self._columns = {
                    name: place for name, place in self._columns.items() if name not in objects
                }
            if not self._columns:
                break

    def join(self, other: "AddedMembers") -> None:
        """Takes the columns of another file to be of one table with those of this one, if their
        objects have the same keys."""
        for name in self._columns.keys() & other._columns.keys():
            if _alike(self._columns[name], other._columns[name]):
                _join(other._columns[name], self._columns[name])
                self._columns[name] = other._columns[name]

    def remove(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], Counter[str]]:
        """Returns the record without added members, and their number by column."""
        values = dict(record)
        added = Counter[str]()
        for name, place in self._columns.items():
            kept, count = _without(
                _parsed(name, record.get(name)), place, 1 if name in MESSAGES else 0
            )
            if count:
                values[name], added[name] = kept, count
        return values, added


def may_have_added(record: Mapping[str, Any]) -> bool:
    """Returns whether a record has a null member in tools, or in what messages say."""
    for name in COLUMNS:
        value = record.get(name)
        if isinstance(value, str) and "null" not in value:
            continue
        value = _parsed(name, value)
        if name in TOOLS and _has_null(value):
            return True
        if name in MESSAGES and any(_has_null(member) for member in _members_of(value)):
            return True
    return False


def _members_of(value: Any) -> Iterator[Any]:
    """Yields what the messages of a list, or one message, say."""
    for message in value if isinstance(value, list) else [value]:
        if isinstance(message, dict):
            yield from message.values()


def _parsed(name: str, value: Any) -> Any:
    """Returns the lists and objects of a column, also where a text in JSON says them; None: it has
    none.

    A text of a prompt or an answer stays one, unless it says messages.
    """
    if isinstance(value, str):
        try:
            value = listed(name, value) if name in MESSAGES[2:] else parse_json(value)
        except UserError:
            return None
    if isinstance(value, list | dict):
        return value
    return None


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(member is None or _has_null(member) for member in value.values())
    return isinstance(value, list) and any(map(_has_null, value))


def _see(value: Any, place: _Place) -> bool:
    """Adds a value to what is known of its place. Returns whether its objects have the keys of the
    others there."""
    if isinstance(value, list):
        inner = place.within.setdefault("", _Place())
        return all(_see(item, inner) for item in value)
    if not isinstance(value, dict):
        return True
    if place.keys is None:
        place.keys = frozenset(value)
    if place.keys != value.keys():
        return False
    for key, member in value.items():
        if member is not None:
            place.given.add(key)
            if isinstance(member, list | dict) and not _see(
                member, place.within.setdefault(f".{key}", _Place())
            ):
                return False
    return True


def _alike(one: _Place, other: _Place) -> bool:
    """Returns whether objects at two places, and at all places within, have the same keys, where
    there are some."""
    if one.keys is not None and other.keys is not None and one.keys != other.keys:
        return False
    return all(
        _alike(one.within[key], other.within[key])
        for key in one.within.keys() & other.within.keys()
    )


def _join(place: _Place, more: _Place) -> None:
    """Adds what objects at an alike place have to what is known of a place."""
    place.keys = more.keys if place.keys is None else place.keys
    place.given |= more.given
    for key, within in more.within.items():
        _join(place.within.setdefault(key, _Place()), within)


def _without(value: Any, place: _Place, above: int) -> tuple[Any, int]:
    """Returns a value without added members, and their number; objects that fewer than `above`
    objects contain keep theirs."""
    count = 0
    if isinstance(value, list):
        inner = place.within.get("", _Place())
        items = []
        for item in value:
            kept, more = _without(item, inner, above)
            items.append(kept)
            count += more
        return items, count
    if not isinstance(value, dict):
        return value, 0
    members = {}
    for key, member in value.items():
        if member is None and key in place.given and above <= 0:
            count += 1
            continue
        members[key], more = _without(member, place.within.get(f".{key}", _Place()), above - 1)
        count += more
    return members, count


# --- what no record means


_FREE = ("default", "const", "examples", "example", "enum")
"""Keywords of JSON Schema whose value may be anything."""


def without_impossible(
    messages: list[Message], tools: list[Any] | None
) -> tuple[list[Message], list[Any] | None, Counter[str]]:
    """Returns a conversation without null properties of tools, and null arguments of calls that the
    called tool does not have.

    Also what is left out, and what stays, with counts.
    """
    counts = Counter[str]()
    properties: dict[str, set[str]] = {}
    if tools is not None and _has_null(tools):
        tools = _schema(tools, counts)
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("parameters"), dict):
            known = function["parameters"].get("properties")
            properties[str(function.get("name"))] = set(known) if isinstance(known, dict) else set()
    kept = []
    for message in messages:
        if _has_null(message.get("tool_calls")):
            calls = [_possible(call, properties, counts) for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        kept.append(message)
    return kept, tools, counts


def _schema(value: Any, counts: Counter[str], key: str = "") -> Any:
    """Returns a part of tools without null properties."""
    if isinstance(value, list):
        return [_schema(item, counts) for item in value]
    if not isinstance(value, dict):
        return value
    members = {}
    for name, member in value.items():
        if member is None and key == "properties":
            counts["null properties of tools, left out"] += 1
            continue
        if member is None:
            counts["null members of tools, which stay"] += 1
        members[name] = (
            member if name in _FREE and key != "properties" else _schema(member, counts, name)
        )
    return members


def _possible(
    call: dict[str, Any], properties: Mapping[str, set[str]], counts: Counter[str]
) -> dict[str, Any]:
    """Returns a tool call without null arguments that the tool does not have."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, dict):
        return call
    known = properties.get(function["name"])
    members = {}
    for name, member in arguments.items():
        if member is None and known is not None and name not in known:
            counts["null arguments that the called tool does not have, left out"] += 1
            continue
        counts["null arguments of calls, which stay"] += member is None
        members[name] = member
    return {**call, "function": {**function, "arguments": members}}
