"""Plans of 200 random cases equal the recorded ones: refactoring must not move a document.

After an intended change of the cost model, the search or an error text, record again and mention it
in the changelog:

    python -m tests.planning.test_recorded_plans
"""

import hashlib
import json
import random
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import Pipeline
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan

RECORD = Path(__file__).parents[1] / "recorded_plans.json"
CASES = 200
PIPELINES = (Pipeline(), Pipeline(), Pipeline(2), Pipeline(3), Pipeline(2, 2), Pipeline(4, 2))
PROFILES = ("cpu-2core", "h100-nvlink-ib", "h200-nvlink-ib")


def draw(case: int) -> dict[str, Any]:
    """Returns the arguments of `make_plan` for one case."""
    rng = random.Random(f"plan {case}")
    ranks, budget = (
        rng.choice([1, 2, 3, 5, 8, 13, 16, 24, 40, 64]),
        rng.choice([257, 1024, 4099, 16384]),
    )
    longest = rng.randint(1 + budget // 8, 1 + ranks * (budget - 1) * 9 // 10)
    lengths = [
        min(longest, 1 + rng.getrandbits(rng.randint(4, 13)))
        for _ in range(rng.randint(1, 12 * ranks))
    ]
    profile = HardwareProfile.load(rng.choice(PROFILES))
    node, levels = rng.choice([2, 3, 8, profile.ranks_per_node]), rng.choice([1, 2])
    mode = rng.choice(["auto", "auto", "bins", "static"])
    return {
        "lengths": [*lengths, longest],
        "ranks": ranks,
        "tokens_per_rank": budget,
        "profile": replace(profile, ranks_per_node=node, exchange_levels=levels),
        "mode": mode,
        "degree": rng.choice([None, ranks]) if mode == "static" else None,
        "bins": rng.choice([None, {budget // 2: 1, ranks * budget: ranks}])
        if mode != "static"
        else None,
        "max_remote_tokens": rng.choice([None, 2 * budget]),
        "pipeline": rng.choice(PIPELINES),
    }


def outcome(case: int) -> list[Any]:
    """Returns the result of a case: winner, digest of placements and rounds, makespan and bounds,
    or a digest of the error."""
    try:
        plan: Plan = make_plan(**draw(case))
    except PlanError as error:
        return ["refused", hashlib.sha256(str(error).encode()).hexdigest()[:16]]
    placements = [[astuple(p) for p in mb] for mb in plan.micro_batches]
    digest = hashlib.sha256(json.dumps(placements).encode()).hexdigest()[:16]
    shares = [plan.exposed_share, plan.idle_share, plan.bubble_share]
    return [plan.winner, digest, plan.makespan_s, plan.lower_bound_s, *shares]


@pytest.mark.parametrize(
    "cases",
    [range(25), pytest.param(range(25, CASES), marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_plans_are_those_that_were_recorded(cases: range) -> None:
    recorded = json.loads(RECORD.read_text("utf-8"))
    assert len(recorded) == CASES
    assert {recorded[case][0].partition(":")[0] for case in cases} >= {"search", "bins", "static"}
    different = [case for case in cases if outcome(case) != recorded[case]]
    assert not different, f"cases {different} are planned differently: see the top of this file"


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(outcome(case)) for case in range(CASES))
    RECORD.write_text(f"[\n{rows}\n]\n", "utf-8")
