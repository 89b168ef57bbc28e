"""Plans of longctx in Megatron-LM's dynamic context parallelism, and so in verl's.

    from megatron_scheduler import use_longctx

    use_longctx("h100-nvlink-ib")  # before training, on every rank, with --dynamic-context-parallel

Megatron asks its packing scheduler which documents every rank runs in every micro-batch; it then
exchanges documents and computes attention itself. Documents of a rank that are in one micro-batch
must share one group, which is an aligned power-of-two number of ranks, and no rank may be empty.
longctx's plans are freer, so each of their micro-batches is halved into such groups as far as its
rings allow.

Written for the dev branch of Megatron-LM at commit d48bd6be0a (2026-08-21; releases up to
megatron-core 0.19.2 do not have this scheduler) and for verl 0.9.1, whose Megatron engine asks the
same class. Scheduling was run, training was not.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.datasets import data_schedule

from longctx import HardwareProfile, make_plan
from longctx.planning.layout import Placement

Group = tuple[int, list[int]]
"""Number of ranks of a group, and the documents that all of them run."""


def halved(placements: Sequence[Placement], first: int, ranks: int, least: int = 1) -> list[Group]:
    """Returns the groups of `ranks` ranks from `first` on, halved until a ring crosses the middle,
    or a half would be empty."""
    half, middle = ranks // 2, first + ranks // 2
    left = [placement for placement in placements if placement.ring.stop <= middle]
    right = [placement for placement in placements if placement.first_rank >= middle]
    if half >= least and left and right and len(left) + len(right) == len(placements):
        return [*halved(left, first, half, least), *halved(right, middle, half, least)]
    return [(ranks, [placement.document for placement in placements])]


def scheduled(
    lengths: Sequence[int],
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
    least: int = 1,
) -> list[list[Group]]:
    """Returns the groups of every micro-batch; a group's ranks follow those of the group before it.

    A group holds at most `tokens_per_rank` tokens per rank, as its ranks did in the plan, and has
    at least `least` ranks. Raises ValueError if the number of ranks is no power of two, and
    PlanError for documents that do not fit.
    """
    if ranks & (ranks - 1):
        raise ValueError(
            f"data times context parallelism is {ranks} ranks: Megatron's groups need a power of "
            "two"
        )
    plan = make_plan(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, profile=profile)
    return [halved(placements, 0, ranks, least) for placements in plan.micro_batches]


class LongctxScheduler(data_schedule.DefaultDynamicCPScheduler):
    """Takes the place of Megatron's scheduler of the same name in `scheduler_map`."""

    profile: HardwareProfile

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.max_num_seqs is not None:
            raise ValueError(
                f"thd_max_packed_sequences is {self.max_num_seqs}: plans do not limit documents; "
                "leave it out"
            )
        if (together := self.microbatch_group_size_per_vp_stage or 1) > 1:
            raise ValueError(
                f"virtual pipelines want a multiple of {together} micro-batches, which plans do "
                "not promise"
            )

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """Returns the ids of the documents by micro-batch and rank; `sample_id_seqlens` are pairs
        of id and padded tokens."""
        ids, lengths = zip(*sample_id_seqlens, strict=True)
        ranks, most = self.dp_size * self.cp_size, self.max_seqlen_per_dp_cp_rank
        return [
            [
                [ids[document] for document in documents]
                for size, documents in groups
                for _ in range(size)
            ]
            for groups in scheduled(lengths, ranks, most, self.profile, self.min_cp_size)
        ]


def use_longctx(profile: HardwareProfile | str) -> None:
    """Makes Megatron plan by longctx. The profile is a shipped name, a file of `longctx calibrate`,
    or a value."""
    LongctxScheduler.profile = (
        HardwareProfile.load(profile) if isinstance(profile, str) else profile
    )
    data_schedule.DefaultDynamicCPScheduler = LongctxScheduler  # which verl imports
    data_schedule.scheduler_map["default_dynamic_cp"] = LongctxScheduler
