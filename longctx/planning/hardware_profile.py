"""Hardware profile: the constants of the cost model, set by hand, read from a file or measured on
this machine."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from longctx.arguments import said
from longctx.errors import UserError
from longctx.paths import local_path
from longctx.safe_yaml import YamlError, parse, read_text

SHIPPED = Path(__file__).parent / "profiles"


BESIDE = ("state_bytes", "split_s_per_token", "received_s_per_token", "split_document_s")
"""Constants of what split documents cost beside the exchange of K and V."""
NO_LIMIT = 1e18
"""Bytes per second of a memory that nothing waits for."""
EfficiencyTable = tuple[tuple[int, float], ...]
SlowRanks = tuple[tuple[int, float], ...]
SLOWEST = 100
"""How many times as long a rank may take."""


TABLES = {
    "attention_efficiency": "[tokens, efficiency] pairs",
    "slow_ranks": "[rank, time relative to the others] pairs",
}
"""Constants that are tables, and what their rows are."""
ALLOWED: dict[str, Callable[[float], bool]] = {
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "a number ≥ 0": lambda value: value >= 0,
    "a positive number": lambda value: value > 0,
}
"""What a constant may be, by the words that say so."""
SHARES = ("overlap", "query_share")
MAY_BE_ZERO = ("latency_s", "launch_s", "step_s", "attention_split_penalty", *BESIDE)


def _rule(name: str) -> str:
    """Returns what a constant may be."""
    if name in SHARES:
        return "in [0, 1]"
    if name == "rate_error":
        return "at least 0 and below 1"
    return "a number ≥ 0" if name in MAY_BE_ZERO else "a positive number"


class ProfileError(UserError):
    """A hardware profile that cannot be read, or has missing, unknown or invalid constants."""


@dataclass(frozen=True)
class HardwareProfile:
    """Constants of the cost model (seconds, bytes and tokens; forward and backward of the layers of
    one pipeline rank).

    Attributes:
        linear_s_per_token: time per token of everything except attention.
        attention_s_per_token2: time of causal attention over a document of s tokens, divided by s²,
            at efficiency 1.
        attention_efficiency: (tokens of an unsplit document, efficiency in (0, 1]) pairs, ascending
            and never falling; interpolated linearly in log2(tokens) and clamped at both ends.
        attention_split_penalty: κ ≥ 0: attention on a document of s tokens at degree d is as
            efficient as on an unsplit document of s / (1 + κ (d - 1)) tokens.
        kv_bytes_per_token: bytes of K and V exchanged per token, summed over all layers and all
            three passes.
        intra_node_bytes_per_s, inter_node_bytes_per_s: bandwidth per rank inside a node and across
            nodes.
        ranks_per_node: number of consecutive ranks of the domain on each node: its GPUs divided by
            the tensor-parallel size.
        latency_s: fixed cost of the exchange per micro-batch.
        overlap: share of attention time, in [0, 1], that can hide the exchange.
        launch_s: fixed cost per micro-batch, including parameter gathering that is not hidden.
        step_s: fixed cost per step: the optimizer, and gradient reduction that is not hidden.
        exchange_levels: 1: K and V go directly from their owner to every rank that needs them. 2:
            in rings that cross nodes, K and V cross the network once per node and are then passed
            on inside the node (`context.two_level_exchange`). Optional, 2 by default.
        query_share: share of `linear_s_per_token`, in [0, 1], that computes queries while K and V
            travel, or the gradient of their input while the gradients of K and V return. It hides
            the exchange at the same `overlap` as attention. 0, the default, for models that compute
            queries before K and V are sent.
        state_bytes: bytes of the states of linear attention that a rank receives from every other
            rank of a document's ring, summed over all layers and passes, whatever the document's
            length. 0, the default, without linear attention.
        split_s_per_token: time per token that the scans of linear attention take more in documents
            on several ranks.
        received_s_per_token: time per token from another rank to compute its K and V from the
            latent that was sent.
        split_document_s: time that each split document takes more on each of its ranks, whatever
            its length: further segments of attention, rows to gather, messages. Documents stay
            whole where a split gains less.
        slow_ranks: (rank of the domain, its time for the same work relative to the others) pairs,
            each above 1, by ascending rank: all that it computes takes that much longer, its
            messages do not. None by default.
        memory_bytes_per_s: rate at which a rank's device reads and writes memory. The share of
            `linear_s_per_token` that it takes depends on the shape of matrices (see
            `longctx.planning.cost.traffic`). By default nothing waits for memory.
        rate_error: share, in [0, 1), by which attention may take more time than its constant says
            while the rest takes less, or the other way round. Of several plans that of mode auto
            then loses least at worst. 0 by default: the constants are taken as they are.
    """

    linear_s_per_token: float
    attention_s_per_token2: float
    attention_efficiency: EfficiencyTable
    kv_bytes_per_token: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    ranks_per_node: int
    latency_s: float
    overlap: float
    launch_s: float
    step_s: float
    exchange_levels: int = 2
    attention_split_penalty: float = 0.3
    query_share: float = 0.0
    state_bytes: float = 0.0
    split_s_per_token: float = 0.0
    received_s_per_token: float = 0.0
    split_document_s: float = 0.0
    slow_ranks: SlowRanks = ()
    memory_bytes_per_s: float = NO_LIMIT
    rate_error: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            name = field.name
            if name in ("attention_efficiency", "exchange_levels", "slow_ranks"):
                continue
            value = getattr(self, name)
            rule = _rule(name)
            if not _is_number(value) or not ALLOWED[rule](value):
                problems.append(f"{name} is {value!r}: must be {rule}")
        if _is_number(self.ranks_per_node) and self.ranks_per_node > 1 << 20:
            problems.append(f"ranks_per_node is {self.ranks_per_node!r}: must be at most {1 << 20}")
        if not isinstance(self.ranks_per_node, int):
            problems.append(f"ranks_per_node is {self.ranks_per_node!r}: must be a whole number")
        if self.exchange_levels not in (1, 2):
            problems.append(f"exchange_levels is {self.exchange_levels!r}: must be 1 or 2")
        problems += self._efficiency_problems()
        problems += self._slow_rank_problems()
        if problems:
            raise ProfileError("; ".join(problems))

    def _efficiency_problems(self) -> list[str]:
        table = self.attention_efficiency
        if not table or not all(_is_pair(row) for row in table):
            columns = TABLES["attention_efficiency"]
            return [f"attention_efficiency is {table!r}: must be a list of {columns}"]
        tokens = [row[0] for row in table]
        values = [row[1] for row in table]
        problems = []
        if min(tokens) < 1 or any(a >= b for a, b in itertools.pairwise(tokens)):
            problems.append(
                f"attention_efficiency tokens {tokens} must be ≥ 1 and strictly ascending"
            )
        if min(values) <= 0 or max(values) > 1:
            problems.append(f"attention_efficiency values {values} must be in (0, 1]")
        if any(a > b for a, b in itertools.pairwise(values)):
            problems.append(
                f"attention_efficiency values {values} fall as documents get longer, which would "
                "break the lower bound: replace each value with the maximum so far"
            )
        return problems

    def _slow_rank_problems(self) -> list[str]:
        table = self.slow_ranks
        if not all(_is_pair(row) for row in table):
            return [f"slow_ranks is {table!r}: must be a list of {TABLES['slow_ranks']}"]
        ranks = [rank for rank, _ in table]
        problems = []
        if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
            problems.append(f"slow_ranks names ranks {ranks}: must be whole numbers ≥ 0")
        if any(before >= after for before, after in itertools.pairwise(ranks)):
            problems.append(f"slow_ranks names ranks {ranks}: must be strictly ascending")
        times = [relative for _, relative in table]
        if not all(1 < relative <= SLOWEST for relative in times):
            problems.append(f"slow_ranks has times {times}: must be above 1, at most {SLOWEST}")
        return problems

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], source: str = "hardware profile"
    ) -> "HardwareProfile":
        """Builds a profile from plain data. Raises ProfileError naming `source` and every missing
        or invalid constant."""
        if not isinstance(values, Mapping):
            raise ProfileError(f"{source} is {said(values)}: must be a mapping of constants")
        known = {field.name for field in fields(cls)}
        values = {
            key: value
            for key, value in values.items()
            if key not in ("name", "about", "describes", "measured")
        }
        missing = sorted(
            field.name
            for field in fields(cls)
            if field.default is MISSING and field.name not in values
        )
        unknown = sorted(map(str, set(values) - known))
        if missing or unknown:
            parts = [f"missing {', '.join(missing)}"] * bool(missing) + [
                f"unknown {', '.join(unknown)}"
            ] * bool(unknown)
            raise ProfileError(
                f"{source}: {'; '.join(parts)}. The constants of a profile are: "
                f"{', '.join(sorted(known))}"
            )
        tables = {}
        for name, columns in TABLES.items():
            if name not in values:
                continue
            table = values[name]
            if not _has_rows(table):
                raise ProfileError(f"{source}: {name} is {table!r}: must be a list of {columns}")
            tables[name] = tuple(tuple(row) for row in table)
        try:
            return cls(**{**values, **tables})
        except ProfileError as error:
            raise ProfileError(f"{source}: {error}") from None

    @classmethod
    def load(cls, name_or_path: str | Path) -> "HardwareProfile":
        """Reads a shipped profile by name (`h100-nvlink-ib`) or from a YAML or JSON file."""
        path, values = read_profile(name_or_path)
        return cls.from_dict(values, source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data that `from_dict` reads back."""
        return {
            **asdict(self),
            "attention_efficiency": [list(row) for row in self.attention_efficiency],
            "slow_ranks": [list(row) for row in self.slow_ranks],
        }


def read_profile(name_or_path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Returns the path of a profile and its whole content, including the described model and
    measurement details."""
    shipped = SHIPPED / f"{name_or_path}.yaml"
    path = shipped if shipped.is_file() else local_path(name_or_path)
    if not path.is_file():
        names = ", ".join(shipped_profiles())
        raise ProfileError(
            f"no hardware profile {str(name_or_path)!r}: give a YAML or JSON file, or one of "
            f"{names}"
        )
    try:
        values = deepcopy(_parsed(read_text(path)))
    except YamlError as error:
        raise ProfileError(f"{path} is not valid YAML or JSON: {error}") from error
    if not isinstance(values, dict):
        held = "is empty" if values is None else f"contains a {type(values).__name__}"
        raise ProfileError(
            f"{path} {held}: must be a mapping of constants, as in `linear_s_per_token: 8.9e-5`"
        )
    return path, values


@lru_cache(maxsize=16)
def _parsed(text: str) -> Any:
    """The value of a profile's text, which estimates of many settings read again and again."""
    return parse(text)


def shipped_profiles() -> list[str]:
    """Returns the names of the profiles that come with longctx, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _has_rows(table: object) -> bool:
    """Returns whether a value is a list of lists."""
    if not isinstance(table, (list, tuple)):
        return False
    return all(isinstance(row, (list, tuple)) for row in table)


def _is_pair(row: Sequence[object]) -> bool:
    """Returns whether a row has two numbers."""
    return len(row) == 2 and all(map(_is_number, row))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
