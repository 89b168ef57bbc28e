"""Robustness of plans to wrong constants: what is lost if attention, matrices or messages take 30 %
more or less time than the profile says, alone and together.

    python bench/plan_robust.py      # a quarter of an hour, one thread

A plan made with a wrong profile is judged by the true one, and compared with the plan made with the
true one. So is the plan of the same profile that knows that its rates may be wrong (`rate_error`).
Writes OUT.csv, one row per profile and kind of steps, with the mean loss of its seeds and the
largest.
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
COLUMNS = ["attention", "matrices", "messages", "rate_error", "steps", "mean_loss", "largest_loss"]


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


def all_factors() -> Iterator[tuple[float, ...]]:
    """Yields factors of the three times: right, each alone wrong, and all eight signs together."""
    yield (1.0,) * len(CONSTANTS)
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


def losses(
    steps: Steps, best_ns: Sequence[int], truth: HardwareProfile, wrong: HardwareProfile
) -> list[float]:
    """Returns by how much longer than `best_ns` each step takes if it is planned with the wrong
    profile."""
    found = []
    for lengths, its_best_ns in zip(steps.lengths, best_ns, strict=True):
        misled = replace(planned(lengths, steps.ranks, wrong), profile=truth)
        found.append(plan_score(misled).makespan_ns / its_best_ns - 1)
    return found


def main() -> None:
    parser = options(__doc__, "plan-robust")
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    truth = HardwareProfile.load(PROFILE)
    about = facts("longctx", "numpy") | {"profile": PROFILE, "command": command()}
    table = Table(given.out.with_suffix(".csv"), COLUMNS, about, overwrite=True)
    kinds = all_steps(given.seeds)
    best_ns = {}
    for steps in kinds:
        best = [planned(lengths, steps.ranks, truth) for lengths in steps.lengths]
        best_ns[steps.name] = [plan_score(plan).makespan_ns for plan in best]
    lost: dict[float, list[float]] = {0.0: [], ERROR: []}
    for factors, rate_error, steps in itertools.product(all_factors(), lost, kinds):
        wrong = replace(with_factors(truth, factors), rate_error=rate_error)
        found = losses(steps, best_ns[steps.name], truth, wrong)
        lost[rate_error] += found
        row = dict(zip(CONSTANTS, factors, strict=True)) | {"rate_error": rate_error}
        mean, largest = fmean(found), max(found)
        table.append(row | {"steps": steps.name, "mean_loss": mean, "largest_loss": largest})
        print(*row.values(), steps.name, f"{mean:.2%}", f"{largest:.2%}", flush=True)
    head = ["rate_error", "plans", "median loss", "largest loss"]
    rows = []
    for rate_error, found in lost.items():
        rows.append([str(rate_error), str(len(found)), f"{median(found):.2%}", f"{max(found):.2%}"])
    print("\n".join(markdown(head, rows, 0)))


if __name__ == "__main__":
    main()
