"""Robustness of plans to wrong constants: what is lost if attention, matrices or messages take 30 %
more or less time than the profile says, alone and together.

    python bench/plan_robust.py      # ten minutes, one thread

A plan made with a wrong profile is judged by the true one, and compared with the plan made with the
true one. Writes OUT.csv, one row per wrong profile and kind of steps, with the mean loss of its
seeds and the largest.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from numpy.random import RandomState

from harness import Table, command, facts, markdown, options
from longctx.comparison.mixes import load_mix
from longctx.planning.cost.rounds import plan_score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from plan import few_long
from plan_large import MEBI, long_tail

PROFILE = "h100-nvlink-ib"
ERROR = 0.3
CONSTANTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention_s_per_token2",),
    "matrices": ("linear_s_per_token",),
    "messages": ("kv_bytes_per_token", "latency_s", "split_document_s"),
}
"""Constants that are wrong together, by what they describe."""
COLUMNS = ["attention", "matrices", "messages", "steps", "mean_loss", "largest_loss"]


@dataclass(frozen=True)
class Steps:
    """Steps of one kind."""

    name: str
    ranks: int
    lengths: Sequence[Sequence[int]]


def all_steps(seeds: int) -> list[Steps]:
    kinds = []
    for mix, ranks in itertools.product(("wlb_128k", "magi_192k", "wikipedia"), (8, 64)):
        lengths = [load_mix(mix).draw(4 * ranks, seed) for seed in range(seeds)]
        kinds.append(Steps(f"{mix}, {ranks} ranks", ranks, lengths))
    kinds.append(Steps("few long, 64 ranks", 64, [few_long(256, seed) for seed in range(seeds)]))
    draw = long_tail(2048, MEBI)
    tails = [[int(length) for length in draw(RandomState(seed))] for seed in range(seeds)]
    kinds.append(Steps("long tail, 256 ranks", 256, tails))
    return kinds


def wrong_factors() -> Iterator[tuple[float, ...]]:
    """Yields factors of the three times: each alone, and all eight signs together."""
    for place, sign in itertools.product(range(len(CONSTANTS)), (-1, 1)):
        factors = [1.0] * len(CONSTANTS)
        factors[place] += sign * ERROR
        yield tuple(factors)
    for signs in itertools.product((-1, 1), repeat=len(CONSTANTS)):
        yield tuple(1 + sign * ERROR for sign in signs)


def with_factors(profile: HardwareProfile, factors: Sequence[float]) -> HardwareProfile:
    """Returns a profile in which what the CONSTANTS describe takes so many times as long."""
    changed = {}
    for names, factor in zip(CONSTANTS.values(), factors, strict=True):
        for name in names:
            changed[name] = factor * getattr(profile, name)
    return replace(profile, **changed)


def planned(lengths: Sequence[int], ranks: int, profile: HardwareProfile) -> Plan:
    return make_plan(lengths, ranks=ranks, tokens_per_rank=16384, profile=profile)


def losses(steps: Steps, truth: HardwareProfile, factors: Sequence[float]) -> list[float]:
    """Returns by how much longer each step takes if it is planned with wrong factors."""
    wrong = with_factors(truth, factors)
    found = []
    for lengths in steps.lengths:
        best = planned(lengths, steps.ranks, truth)
        misled = replace(planned(lengths, steps.ranks, wrong), profile=truth)
        found.append(plan_score(misled).makespan_ns / plan_score(best).makespan_ns - 1)
    return found


def main() -> None:
    parser = options(__doc__, "plan-robust")
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    truth = HardwareProfile.load(PROFILE)
    about = facts("longctx", "numpy") | {"profile": PROFILE, "command": command()}
    table = Table(given.out.with_suffix(".csv"), COLUMNS, about, overwrite=True)
    of_factors = []
    for factors, steps in itertools.product(wrong_factors(), all_steps(given.seeds)):
        lost = losses(steps, truth, factors)
        row = dict(zip(CONSTANTS, factors, strict=True))
        mean, largest = fmean(lost), max(lost)
        table.append(row | {"steps": steps.name, "mean_loss": mean, "largest_loss": largest})
        of_factors += lost
        print(*row.values(), steps.name, f"{mean:.2%}", f"{largest:.2%}", flush=True)
    head = ["plans", "median loss", "largest loss"]
    cells = [str(len(of_factors)), f"{median(of_factors):.2%}", f"{max(of_factors):.2%}"]
    print("\n".join(markdown(head, [cells], 0)))


if __name__ == "__main__":
    main()
