"""Hardware profile: the constants of the cost model, given by hand, read from a file or measured on the machine at hand."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from longctx.errors import UserError
from longctx.safe_yaml import SafeLoader

SHIPPED = Path(__file__).parent / "profiles"


EfficiencyTable = tuple[tuple[int, float], ...]


class ProfileError(UserError):
    """A hardware profile with missing, unknown or impossible constants."""


@dataclass(frozen=True)
class HardwareProfile:
    """Constants of the cost model (seconds, bytes and tokens; forward and backward of one pipeline stage).

    Attributes:
        linear_s_per_token: time of everything but attention, per token.
        attention_s_per_token2: time of causal attention over a document of s tokens, divided by s², at efficiency 1.
        attention_efficiency: (tokens of a whole document, efficiency in (0, 1]) in ascending order; linear in log2(tokens)
            between the points, clamped at both ends, and never falling.
        attention_split_penalty: κ ≥ 0: attention on a document of s tokens at degree d is as efficient as on a whole one of
            s / (1 + κ (d - 1)) tokens.
        kv_bytes_per_token: bytes of K and V exchanged per token, all layers and all three passes.
        intra_node_bytes_per_s, inter_node_bytes_per_s: bandwidth of one rank inside its node and across nodes.
        ranks_per_node: how many consecutive ranks of the domain share a node.
        latency_s: fixed cost of the exchange in a micro-batch.
        overlap: share of attention time in [0, 1] that can hide the exchange.
        launch_s: fixed cost of a micro-batch, including parameter gathering that is not hidden.
        step_s: fixed cost of a step: the optimizer and gradient reduction that is not hidden.
        exchange_levels: 1: rows go straight from their owner to every rank that needs them. 2: where a ring crosses nodes, once
            to each node, its ranks taking turns, and on inside it (a run's `context.two_level_exchange`; may be left out).
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

    def __post_init__(self) -> None:
        problems = []
        for name in (
            "linear_s_per_token",
            "attention_s_per_token2",
            "kv_bytes_per_token",
            "intra_node_bytes_per_s",
            "inter_node_bytes_per_s",
            "ranks_per_node",
        ):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                problems.append(f"{name} is {value!r}: must be a positive number")
        for name in ("latency_s", "launch_s", "step_s", "attention_split_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                problems.append(f"{name} is {value!r}: must be a number ≥ 0")
        if not _is_number(self.overlap) or not 0 <= self.overlap <= 1:
            problems.append(f"overlap is {self.overlap!r}: must lie in [0, 1]")
        if not isinstance(self.ranks_per_node, int):
            problems.append(f"ranks_per_node is {self.ranks_per_node!r}: must be a whole number")
        if self.exchange_levels not in (1, 2):
            problems.append(f"exchange_levels is {self.exchange_levels!r}: must be 1 or 2")
        problems += self._efficiency_problems()
        if problems:
            raise ProfileError("; ".join(problems))

    def _efficiency_problems(self) -> list[str]:
        table = self.attention_efficiency
        if not table or any(len(row) != 2 or not all(map(_is_number, row)) for row in table):
            return [f"attention_efficiency is {table!r}: must be a list of [tokens, efficiency] pairs"]
        tokens, values = [row[0] for row in table], [row[1] for row in table]
        problems = []
        if min(tokens) < 1 or any(a >= b for a, b in itertools.pairwise(tokens)):
            problems.append(f"attention_efficiency tokens {tokens} must be ≥ 1 and ascend")
        if min(values) <= 0 or max(values) > 1:
            problems.append(f"attention_efficiency values {values} must lie in (0, 1]")
        if any(a > b for a, b in itertools.pairwise(values)):
            problems.append(
                f"attention_efficiency values {values} fall with length, which would break the lower bound: "
                "replace each value by the greatest so far"
            )
        return problems

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "hardware profile") -> "HardwareProfile":
        """Builds a profile from plain data. Raises ProfileError naming `source` and every constant that is wrong or missing."""
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in values.items() if key not in ("name", "about", "describes", "measured")}
        missing = sorted(field.name for field in fields(cls) if field.default is MISSING and field.name not in values)
        unknown = sorted(set(values) - known)
        if missing or unknown:
            parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(unknown)}"] * bool(unknown)
            raise ProfileError(f"{source}: {'; '.join(parts)}. A profile has exactly: {', '.join(sorted(known))}")
        table = values["attention_efficiency"]
        if not isinstance(table, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in table):
            raise ProfileError(f"{source}: attention_efficiency is {table!r}: must be a list of [tokens, efficiency] pairs")
        try:
            return cls(**{**values, "attention_efficiency": tuple(tuple(row) for row in table)})
        except ProfileError as error:
            raise ProfileError(f"{source}: {error}") from None

    @classmethod
    def load(cls, name_or_path: str | Path) -> "HardwareProfile":
        """Reads a shipped profile by name (`h100-nvlink-ib`) or a YAML/JSON file."""
        path, values = read_profile(name_or_path)
        return cls.from_dict(values, source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        return {**asdict(self), "attention_efficiency": [list(row) for row in self.attention_efficiency]}


def read_profile(name_or_path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The file of a profile, shipped or not, and all that it says: also what it describes, and how it was measured."""
    shipped = SHIPPED / f"{name_or_path}.yaml"
    path = shipped if shipped.is_file() else Path(name_or_path)
    if not path.is_file():
        names = ", ".join(shipped_profiles())
        raise ProfileError(f"no hardware profile {str(name_or_path)!r}: give a YAML or JSON file, or one of {names}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} is not valid YAML or JSON: {error}") from error
    if not isinstance(values, dict):
        held = "nothing" if values is None else type(values).__name__
        raise ProfileError(f"{path} holds {held}: must be a mapping of constants, as in `linear_s_per_token: 8.9e-5`")
    return path, values


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with longctx."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
