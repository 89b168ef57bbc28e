"""Hedge: a plan that stays good where the profile's rates are wrong.

A rank with a part of a long document computes mostly attention, one with short documents mostly
matrices. If their rates are wrong in opposite directions, such ranks no longer finish together.
Where long documents take more ranks and leave room for short ones on each, they do: the model then
sees a little more time, and reality varies less.
"""

from collections.abc import Iterator
from dataclasses import replace

from longctx.planning.cost.rounds import PRICE
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planning_input import Candidate, PlanningInput
from longctx.planning.planners.search import is_possible, search_in_blocks


def hedged(given: PlanningInput, best: Candidate) -> Candidate:
    """Returns the plan that loses least, at worst, where attention or matrices take a share
    `rate_error` of the profile more time and the other one less: `best`, or one with longer rings.

    What a plan loses is counted from the lower bound of those rates. The candidate has the times of
    the profile itself.
    """
    error = given.profile.rate_error
    if error == 0:
        return best
    possible = [given, *_with_wrong_rates(given, error)]
    bounds_ns = [each.step_bound_ns() for each in possible]

    def worst_loss(candidate: Candidate) -> float:
        losses = []
        for each, bound_ns in zip(possible, bounds_ns, strict=True):
            its = each.candidate(candidate.winner, candidate.assignment)
            losses.append(its.makespan_ns / bound_ns)
        return max(losses)

    return min([best, *_with_longer_rings(given)], key=worst_loss)


def _with_wrong_rates(given: PlanningInput, error: float) -> Iterator[PlanningInput]:
    for sign in (-1, 1):
        profile = with_rates(given.profile, attention=1 + sign * error, matrices=1 - sign * error)
        yield replace(given, profile=profile)


def with_rates(profile: HardwareProfile, *, attention: float, matrices: float) -> HardwareProfile:
    """Returns a profile in which attention and matrices take so many times as long."""
    return replace(
        profile,
        attention_s_per_token2=attention * profile.attention_s_per_token2,
        linear_s_per_token=matrices * profile.linear_s_per_token,
    )


def _with_longer_rings(given: PlanningInput) -> Iterator[Candidate]:
    """Yields plans whose rings take only a share of the time of a micro-batch, in blocks of
    several sizes."""
    settings = given.settings
    priced = replace(given, round_price=PRICE)
    for block in settings.blocks:
        if block > settings.first_block or not is_possible(given, block):
            continue
        for share in settings.hedge_shares:
            # One limit for all micro-batches, however many there are.
            one_limit = replace(settings, shares=(share,), several=len(given.lengths) + 1)
            candidate = search_in_blocks(priced.in_blocks(block), one_limit)
            if candidate is not None:
                yield candidate._replace(winner="hedged search")
