"""Check: the guarantees of a plan that training relies on. Every plan is checked before anybody sees it.

I1: every document stands in exactly one micro-batch, on ranks of the domain. I4: no rank holds more than `tokens_per_rank` in
any micro-batch. Together with the order of micro-batches (I2) and the purity of the layout (I3) they exclude deadlock and
overflow.
"""

from collections import Counter

import numpy as np

from longctx.planning.assignment import Assignment, tokens_on_ranks
from longctx.planning.plan import Plan, PlanError


def check_plan(plan: Plan) -> None:
    """Raises PlanError naming document, micro-batch and rank where a plan breaks a guarantee."""
    _check_form(plan)
    _check_documents(plan)
    _check_tokens(plan)


def _check_form(plan: Plan) -> None:
    if not _whole(plan.ranks) or not _whole(plan.tokens_per_rank):
        raise PlanError(f"ranks {plan.ranks!r} and tokens_per_rank {plan.tokens_per_rank!r} must be whole numbers ≥ 1")
    for document, length in enumerate(plan.lengths):
        if not _whole(length):
            raise PlanError(f"document {document} has length {length!r}: must be a whole number ≥ 1")
    if len(plan.stages) != len(plan.micro_batches):
        raise PlanError(f"plan has {len(plan.stages)} stages for {len(plan.micro_batches)} micro-batches: needs one each")
    for micro_batch, stages in enumerate(plan.stages):
        if not _whole(stages):
            raise PlanError(f"micro-batch {micro_batch} has {stages!r} exchange stages: must be a whole number ≥ 1")


def _check_documents(plan: Plan) -> None:
    seen: Counter[int] = Counter()
    for micro_batch, placements in enumerate(plan.micro_batches):
        if not placements:
            raise PlanError(f"micro-batch {micro_batch} holds no document")
        for p in placements:
            where = f"document {p.document!r} in micro-batch {micro_batch}"
            if not _whole(p.degree) or not _whole(p.first_rank, least=0) or not isinstance(p.reversed, bool):
                raise PlanError(
                    f"{where} is malformed: degree {p.degree!r}, first rank {p.first_rank!r}, reversed {p.reversed!r}"
                )
            if p.first_rank + p.degree > plan.ranks:
                raise PlanError(
                    f"{where} stands on ranks {p.first_rank} to {p.first_rank + p.degree - 1}: the domain has {plan.ranks}"
                )
            if not _whole(p.document, least=0) or p.document >= len(plan.lengths):
                raise PlanError(f"{where} does not exist: the plan has {len(plan.lengths)} documents, counted from 0")
            seen[p.document] += 1
    if len(seen) < len(plan.lengths):
        missing = next(document for document in range(len(plan.lengths)) if document not in seen)
        raise PlanError(f"document {missing} stands in no micro-batch")
    document, times = seen.most_common(1)[0] if seen else (0, 1)
    if times > 1:
        places = [k for k, placements in enumerate(plan.micro_batches) for p in placements if p.document == document]
        raise PlanError(f"document {document} stands {times} times in the plan, in micro-batches {places}: must be once")


def _check_tokens(plan: Plan) -> None:
    if not plan.lengths:
        return
    assignment = Assignment.of(plan)
    tokens = tokens_on_ranks(np.array(plan.lengths, dtype=np.int64), assignment, (len(plan.micro_batches), plan.ranks))
    over = np.argwhere(tokens > plan.tokens_per_rank)
    if len(over):
        micro_batch, rank = over[0].tolist()
        documents = [p.document for p in plan.micro_batches[micro_batch] if rank in p.ring]
        raise PlanError(
            f"rank {rank} holds {tokens[micro_batch, rank]} tokens in micro-batch {micro_batch} (documents {documents}): "
            f"the budget is {plan.tokens_per_rank} tokens a rank"
        )


def _whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
