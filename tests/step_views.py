"""A whole step of the trainer on many ranks, seen by each of them alone: every message and
collective that a rank issues, in the order of its host.

A view is a process forked from this one, with torch's process group that sends nothing, and real
tensors of a tiny model. All code of a step runs: groups, plan, forward, backward, norm, optimizer,
numbers. What would arrive is made up, so numbers mean nothing; orders and sizes do not depend on
them, but for the rows that travel to experts, which are not compared.
"""

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from longctx.config import Config, load
from longctx.data.packing import StepBatch, pack_documents
from longctx.parallel import mesh as mesh_module
from longctx.parallel.mesh import make_groups
from longctx.planning.plan import Plan
from longctx.training.build import sizes_of_groups
from longctx.training.trainer import Trainer
from tests.host_waits import OPERATORS
from tests.whole_size import fake_ranks, plan_of

VOCABULARY = 100
SETTINGS = [
    f"model.vocab_size={VOCABULARY}",
    "data.store=unused",
    "train.device=cpu",
    "context.two_level_exchange=true",
    "batch.tokens_per_rank=150",
]
SHORT = [90, 64, 33, 20, 5]
"""Lengths of further documents."""
HERE = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators that issue nothing."""
ROWS = "alltoall_base_"
"""Rows that a router chooses travel to their experts."""


class Group(NamedTuple):
    """A process group: its name, which all its ranks must give it, and its ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Issued:
    """What a rank issued.

    Attributes:
        kind: the operator, such as allgather_.
        sizes: of its tensors, with their dtypes.
        peer: the other rank of a message; None for collectives.
        batch: number of the batch of messages on this rank, whose messages go at once.
    """

    kind: str
    group: Group
    sizes: tuple[str, ...]
    peer: int | None = None
    batch: int = -1


class Recorder(TorchDispatchMode):
    """Records what this rank issues, and makes up what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Issued] = []
        self.batch = -1
        self.batches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in OPERATORS:
            with self:  # a custom operator is opaque to modes
                return OPERATORS[name](*args, **kwargs)
        namespace, kind = name.split("::")
        if "c10d" in namespace and kind not in HERE:
            self.record(kind, args)
        if kind == ROWS:  # torch makes them up from those that leave, and there may be none
            arrived, _, group, received, _, *others = args
            args = arrived, torch.ones_like(arrived), group, received, received, *others
        out = func(*args, **kwargs)
        if kind == "recv_":
            for tensor in args[0]:
                tensor.fill_(1)
        if kind == "_reduce_scatter_base_":
            args[0].zero_()
        return out

    def record(self, kind: str, args: Any) -> None:
        groups = [found for found in map(group_of, args) if found is not None]
        assert len(groups) == 1, f"{kind} of {args}"
        group = groups[0]
        tensors = [each for each in tree_iter(args) if isinstance(each, torch.Tensor)]
        if kind == ROWS:
            tensors = [each[:0] for each in tensors]
        sizes = tuple(f"{tuple(each.shape)} {each.dtype}" for each in tensors)
        peer = None
        if kind in ("send", "recv_"):
            peer = group.ranks[args[2]]
        self.issued.append(Issued(kind, group, sizes, peer, self.batch))

    def post(self, operations: Any) -> Any:
        """Stands for `batch_isend_irecv`."""
        self.batch = self.batches
        self.batches += 1
        works = []
        for each in operations:
            end = "group_src"
            if each.op is dist.isend:
                end = "group_dst"
            works.append(each.op(each.tensor, group=each.group, **{end: each.group_peer}))
        self.batch = -1
        return works


def group_of(argument: Any) -> Group | None:
    """Returns the group that an argument of an operator is."""
    if isinstance(argument, torch.ScriptObject):
        try:
            name = dist.ProcessGroup.unbox(argument).group_name
        except RuntimeError:  # another object, such as the kind of a reduction
            return None
    elif isinstance(argument, str):
        name = argument
    else:
        return None
    for group, its_name in distributed_c10d._world.pg_names.items():
        if its_name == name:
            return Group(name, tuple(dist.get_process_group_ranks(group)))
    return None


@dataclass(frozen=True)
class World:
    """Ranks on nodes, the settings of their run, and the plan of its step."""

    ranks: int
    per_node: int
    config: Config
    plan: Plan

    @classmethod
    def of(cls, ranks: int, per_node: int, settings: list[str]) -> "World":
        """Plans a step of several micro-batches, with a document over almost all ranks."""
        with mock.patch.dict(os.environ, launched(0, ranks, per_node)):
            config = load(None, [*SETTINGS, *settings], world_size=ranks)
            most = config.domain(ranks) * config.batch.tokens_per_rank
            lengths = [most * 9 // 10, most // 3, most // 4, *SHORT]
            plan = plan_of(config, ranks, VOCABULARY, lengths)
        return cls(ranks, per_node, config, plan)

    def views(self, ranks: Sequence[int]) -> dict[int, list[Issued]]:
        """Returns what each of these ranks issues, in processes of their own."""
        context = multiprocessing.get_context("fork")
        with context.Pool(2, maxtasksperchild=1) as pool:
            found = pool.map(self.view, ranks, chunksize=1)
        return dict(zip(ranks, found, strict=True))

    def view(self, rank: int) -> list[Issued]:
        """Runs a step as `rank`. Once in a process, as torch remembers meshes."""
        torch.set_num_threads(1)
        recorder = Recorder()
        with (
            mock.patch.dict(os.environ, launched(rank, self.ranks, self.per_node)),
            mock.patch.object(mesh_module, "warm_up"),
            mock.patch.object(dist, "batch_isend_irecv", recorder.post),
            fake_ranks(rank, self.ranks),
            recorder,
        ):
            mesh = make_groups(torch.device("cpu"), **sizes_of_groups(self.config))
            trainer = Trainer.of(self.config, mesh, self.config.model_source(VOCABULARY))
            trainer.step(self.batch(mesh.rank))
        return recorder.issued

    def batch(self, rank: int) -> StepBatch:
        """Returns the share of a step of a rank of the domain."""
        lengths = self.plan.lengths
        documents = [np.zeros(length, np.int64) for length in lengths]
        packed, targets = pack_documents(
            self.plan, rank, documents, pad_to_multiple_of=self.config.padding
        )
        names = tuple(map(str, range(len(lengths))))
        return StepBatch(1, self.plan, names, sum(lengths), targets, tuple(packed))


def launched(rank: int, ranks: int, per_node: int) -> dict[str, str]:
    """Returns what a launcher says in the environment of a process."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
    }
    return {name: str(number) for name, number in numbers.items()}


Views = Mapping[int, Sequence[Issued]]


def differences(views: Views) -> list[str]:
    """Returns where the ranks of a group issue other collectives, or in another order, and messages
    that their other end does not expect. Only ranks with a view are compared."""
    collectives: dict[Group, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    messages: dict[Any, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for rank, issued in views.items():
        for one in issued:
            if one.peer is None:
                collectives[one.group][rank].append((one.kind, one.sizes))
            elif one.peer in views:
                ends = (rank, one.peer) if one.kind == "send" else (one.peer, rank)
                messages[one.group, ends][one.kind].append(one.sizes)
    wrong = []
    for group, by_rank in collectives.items():
        members = [rank for rank in group.ranks if rank in views]
        first = by_rank[members[0]]
        wrong += [
            f"group {group.name}: ranks {members[0]} and {rank}"
            for rank in members[1:]
            if by_rank[rank] != first
        ]
    for (group, ends), by_kind in messages.items():
        if by_kind["send"] != by_kind["recv_"]:
            wrong.append(f"group {group.name}: messages from {ends[0]} to {ends[1]}")
    return wrong


def waiting(views: Views) -> dict[int, Issued]:
    """Plays a step in which every rank ends what it has issued before it issues the next one: more
    waiting than any GPU has. Returns what ranks wait for at the end; empty: all are done."""
    steps = {rank: list(grouped(issued)) for rank, issued in views.items()}
    place = dict.fromkeys(views, 0)
    posted: dict[Any, set[int]] = defaultdict(set)
    counts: dict[Any, int] = defaultdict(int)
    current: dict[int, list[tuple[Any, tuple[int, ...]]]] = {}

    def post(rank: int) -> None:
        """Issues the next step of a rank: the meetings that it has to wait for, with their
        ranks."""
        current[rank] = []
        if place[rank] == len(steps[rank]):
            return
        for one in steps[rank][place[rank]]:
            ranks = one.group.ranks
            key: Any = one.group
            if one.peer is not None:
                ranks = (rank, one.peer)
                ends = ranks if one.kind == "send" else ranks[::-1]
                key = one.group, ends
            number = counts[key, rank]
            counts[key, rank] += 1
            posted[key, number].add(rank)
            current[rank].append(((key, number), ranks))

    for rank in views:
        post(rank)
    moved = True
    while moved:
        moved = False
        for rank in views:
            over = all(posted[meeting] >= set(ranks) for meeting, ranks in current[rank])
            if over and place[rank] < len(steps[rank]):
                place[rank] += 1
                post(rank)
                moved = True
    left = {rank: at for rank, at in place.items() if at < len(steps[rank])}
    return {rank: steps[rank][at][0] for rank, at in left.items()}


def grouped(issued: Sequence[Issued]) -> Iterator[list[Issued]]:
    """Yields collectives alone, and the messages of a batch together."""
    batch: list[Issued] = []
    for one in issued:
        if batch and one.batch != batch[0].batch:
            yield batch
            batch = []
        if one.batch < 0:
            yield [one]
        else:
            batch.append(one)
    if batch:
        yield batch
