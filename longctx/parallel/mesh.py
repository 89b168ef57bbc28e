"""Process groups: of a run (`Mesh`), and for the rings of trainers; all other modules are given a
group or a mesh."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.device_mesh import DeviceMesh

from longctx.attention import warm_up
from longctx.attention.kernels.flash_libraries import SM_MARGIN
from longctx.errors import UserError
from longctx.parallel.environment import Launch, processes_per_node
from longctx.parallel.meeting import meet_all
from longctx.parallel.peers import Peers

SET_TIMEOUT = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
"""Public from torch 2.15 on."""
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name from torch 2.13 on, and the one before."""
AXES = ("pp", "tp", "dp_cp")
NO_DIGEST = -1
"""Number of a digest that a rank does not have yet."""
COPIES = ("dp_replicate", "dp_shard")
"""Axes that `dp_cp` consists of if several parts of it each hold a copy of the weights."""
EXPERT_COPIES = ("ep_replicate", "ep_shard")
"""Axes over which the experts of a rank are replicated and sharded."""


@dataclass(frozen=True)
class Mesh:
    """The process groups of a run, from the view of one rank.

    Attributes:
        domain: one-dimensional mesh over the ranks of combined data and context parallelism
            (`dp_cp`).
        weights: mesh over the same ranks, over which parameters are sharded: the domain, or
            (replicas, shards).
        tensor: one-dimensional mesh over the ranks of tensor parallelism, which have the same
            tokens (`tp`).
        copies: `tensor` and `weights` as one mesh, in the order in which a weight matrix is split.
        exchange: separate communicator for the messages of ring attention, which so never queue
            behind collectives.
        across: another one for those between nodes; None on one node.
        control: gloo group over all ranks, for flags, hashes and checkpoints; on GPUs the only one
            for host memory.
        experts: mesh of the ranks with this stage of the model: those that hold each expert once,
            then the others, as in `weights`; None if no experts are split.
        tokens: group of all ranks with this stage of the model, if experts or tensor ranks share
            it, for sums over tokens.
        pipeline: group of the ranks whose stages form one model, in order; None without a pipeline.
        ends: group of the first and last rank of `pipeline`, which share a tied embedding; None on
            other ranks and without a pipeline.
    """

    device: torch.device
    domain: DeviceMesh
    weights: DeviceMesh
    tensor: DeviceMesh
    copies: DeviceMesh
    exchange: dist.ProcessGroup
    control: dist.ProcessGroup
    pipeline: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None
    experts: DeviceMesh | None = None
    tokens: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    peers: Peers | None = None
    """Signs of life of the other processes, if they have met in a launcher's store."""

    @property
    def rank(self) -> int:
        """Rank of this process in the domain."""
        return self.domain.get_local_rank()

    @property
    def ranks(self) -> int:
        """Number of ranks N in the domain."""
        return self.domain.size()

    @property
    def world_rank(self) -> int:
        """Rank of this process in the whole run."""
        return dist.get_rank(self.control)

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return dist.get_world_size(self.control)

    @property
    def pipeline_rank(self) -> int:
        """Rank of this process in its pipeline; 0 without one."""
        if self.pipeline is None:
            return 0
        return dist.get_rank(self.pipeline)

    @property
    def stage(self) -> dist.ProcessGroup:
        """Group of all ranks with this stage of the model."""
        return self.tokens or self.domain.get_group()

    @property
    def counts(self) -> bool:
        """Whether this rank contributes to sums over the run, so that they count every token once.

        True for one tensor rank per rank of the domain; in a pipeline only on the last stage, where
        the losses are.
        """
        last = self.pipeline is None or self.pipeline_rank == dist.get_world_size(self.pipeline) - 1
        return last and self.tensor.get_local_rank() == 0

    def gather(self, values: list[float]) -> torch.Tensor:
        """Returns the `values` of all ranks of the run, float64 [world size, values], on the CPU of
        every rank."""
        rows = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(rows, torch.tensor(values, dtype=torch.float64), group=self.control)
        return torch.stack(rows)

    def gather_on_device(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the `values` [n] of all ranks of the run, [world size, n], on the device of every
        rank. The host does not wait.

        They go over the groups that weights and stages have, axis by axis from the innermost of
        world ranks on, so that no other communicator is made.
        """
        gathered = values
        groups = [self.tensor.get_group(), *reversed(self.weights.get_all_groups())]
        if self.pipeline is not None:
            groups.append(self.pipeline)
        for group in groups:
            ranks = dist.get_world_size(group)
            if ranks > 1:
                everyones = gathered.new_empty(ranks, gathered.numel())
                ALL_GATHER(everyones, gathered.view(1, -1), group=group)
                gathered = everyones
        return gathered.view(self.world_size, len(values))

    def gather_with_digest(
        self, values: list[float], digest: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `values` of all ranks of the run, float64 [world size, values], and the
        numbers of their hexadecimal digests, int64 [world size], on the CPU of every rank.

        The number of a digest is its first 60 bits; of None it is `NO_DIGEST`. One collective.
        """
        number = NO_DIGEST if digest is None else number_of(digest)
        bits = torch.tensor(values, dtype=torch.float64).view(torch.int64)
        row = torch.cat([bits, torch.tensor([number])])
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row, group=self.control)
        gathered = torch.stack(rows)
        return gathered[:, :-1].contiguous().view(torch.float64), gathered[:, -1]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the `value` (picklable) of every rank, on every rank."""
        return gather_objects(value, self.control)

    def agree(self, digest: str, what: str) -> None:
        """Raises RuntimeError on every rank unless all ranks have the same hexadecimal `digest` of
        `what`."""
        _, numbers = self.gather_with_digest([], digest)
        differ = numbers != numbers[0]
        if differ.any():
            others = differ.nonzero().flatten().tolist()
            raise RuntimeError(
                f"ranks disagree on {what}: ranks {others} differ from rank 0. Do all nodes run "
                "the same versions of longctx and numpy, on the same store and settings?"
            )

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Closes the groups; after an error on one of several ranks they stay, as `leave` says."""
        if error is None:
            self.close()
        else:
            leave(together=False)

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        # Gloo's threads drop their last tensors under Python's lock, which the end of a group holds
        # until they are done.
        time.sleep(0.01)
        dist.destroy_process_group()


def leave(*, together: bool) -> None:
    """Ends the groups of this process after an error, or another run in this process would meet
    them.

    On several ranks only if all leave `together`: otherwise the end of a group may wait for the
    others, and the launcher ends this process anyway.
    """
    if dist.is_initialized() and (together or dist.get_world_size() == 1):
        dist.destroy_process_group()


def require_no_group() -> None:
    """Raises UserError if this process is in groups already, which are not this run's to use or to
    end."""
    if dist.is_initialized():
        raise UserError(
            "this process has a process group already, of another trainer or of a run that failed "
            "on some of its ranks: call torch.distributed.destroy_process_group() before, or "
            "start a new process"
        )


def number_of(digest: str) -> int:
    """Returns the first 60 bits of a hexadecimal digest."""
    return int(digest[:15], 16)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the `value` (picklable) of every rank of a gloo group, on every rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def join(
    launch: Launch,
    device: torch.device,
    *,
    timeout_s: float = 600.0,
    check: Callable[[dist.ProcessGroup], None] | None = None,
    **sizes: Any,
) -> Mesh:
    """Joins the processes that torchrun started (or runs alone) and makes the groups of these
    sizes, as `make_groups` does.

    On GPUs all groups but `control` have only NCCL: gloo connects every pair of ranks of every
    group, which takes minutes at hundreds of ranks.
    """
    require_no_group()
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        try:
            return make_groups(device, **sizes, timeout_s=timeout_s, check=check)
        except BaseException:
            leave(together=True)
            raise
    store = meet_all(launch, timeout_s)
    peers = Peers(PrefixStore("peers", store), launch.rank, launch.world_size, timeout_s)
    try:
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
        return replace(make_groups(device, **sizes, timeout_s=timeout_s, check=check), peers=peers)
    except RuntimeError as error:
        error.add_note(peers.report(str(error)))
        raise


def make_groups(
    device: torch.device,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    shard_ranks: int | None = None,
    expert: int | None = None,
    timeout_s: float = 600.0,
    check: Callable[[dist.ProcessGroup], None] | None = None,
) -> Mesh:
    """Makes the groups of a run from all processes of the default group.

    `shard_ranks` consecutive ranks of the domain share one copy of the weights; None: all of them.
    The experts of a mixture are split over `expert` consecutive ranks of the domain and their
    tensor ranks; None: the model has no experts. A collective or message that takes longer than
    `timeout_s` seconds raises an error. Groups for messages between ranks are warmed up. `check` is
    called with the group of all ranks before there are others, which only ranks with the same sizes
    can make.
    """
    timeout = timedelta(seconds=timeout_s)
    control = dist.new_group(backend="gloo", timeout=timeout)
    if check is not None:
        check(control)
    ranks = dist.get_world_size() // (pipeline * tensor)
    shards = ranks if shard_ranks is None else shard_ranks
    # Tensor ranks are neighbors; their axis comes before the domain's, as weights are first split
    # over it.
    numbers = torch.arange(pipeline * ranks * tensor).view(pipeline, ranks, tensor).transpose(1, 2)
    # Torch 2.11 compares strides, also of axes of size 1.
    numbers = numbers.clone(memory_format=torch.contiguous_format)
    domain, weights, of_tensor, copies = _weight_meshes(device, numbers, shards, timeout)
    # The domain's group may be the world's, so the exchange gets a separate one.
    exchange, across = exchange_groups(numbers.reshape(-1, ranks), timeout, device)
    stages = ends = None
    if pipeline > 1:
        columns = numbers.permute(2, 1, 0).reshape(-1, pipeline)
        stages = _my_group(columns, timeout)
        ends = _my_group(columns[:, [0, -1]], timeout)
    experts = tokens = None
    if expert is not None or tensor > 1:
        tokens = _my_group(numbers.reshape(pipeline, -1), timeout)
    if expert is not None and expert * tensor > 1:
        experts = _expert_mesh(
            device, (pipeline, ranks // shards, shards // expert, expert * tensor), timeout
        )
    mesh = Mesh(
        device,
        domain,
        weights=weights,
        tensor=of_tensor,
        copies=copies,
        exchange=exchange,
        control=control,
        pipeline=stages,
        ends=ends,
        experts=experts,
        tokens=tokens,
        across=across,
    )
    for group in (exchange, across, stages, ends):
        if group is not None:
            warm_up(group, device)
    return mesh


def _weight_meshes(
    device: torch.device, numbers: torch.Tensor, shards: int, timeout: timedelta
) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh, DeviceMesh]:
    """Makes the meshes `domain`, `weights`, `tensor` and `copies` from the ranks [pipeline, tensor,
    domain]."""
    if shards == numbers.shape[2]:
        whole = DeviceMesh(device.type, numbers, mesh_dim_names=AXES)
        domain = weights = whole["dp_cp"]
        copies = whole["tp", "dp_cp"]
    else:
        axes = (*AXES[:2], *COPIES)
        whole = DeviceMesh(device.type, numbers.unflatten(2, (-1, shards)), mesh_dim_names=axes)
        weights = whole[COPIES]
        copies = whole[axes[1:]]
        domain = weights._flatten(AXES[2])
    for axis in {domain.get_group(), whole["tp"].get_group(), *weights.get_all_groups()}:
        SET_TIMEOUT(timeout, axis)  # the default of meshes is many minutes
    return domain, weights, whole["tp"], copies


def _expert_mesh(
    device: torch.device, sizes: tuple[int, int, int, int], timeout: timedelta
) -> DeviceMesh:
    """Makes the mesh over which experts are split, from the numbers of stages, replicas, shards and
    ranks with each expert."""
    numbers = torch.arange(math.prod(sizes)).view(sizes).permute(0, 3, 1, 2)
    axes: tuple[str, ...] = ("pp", "ep", *EXPERT_COPIES)
    if sizes[1] == 1:
        numbers = numbers.squeeze(2)
        axes = ("pp", "ep", EXPERT_COPIES[1])
    whole = DeviceMesh(
        device.type, numbers.clone(memory_format=torch.contiguous_format), mesh_dim_names=axes
    )
    mesh = whole[axes[1:]]
    for axis in mesh.get_all_groups():
        SET_TIMEOUT(timeout, axis)
    return mesh


def exchange_groups(
    rows: torch.Tensor, timeout: timedelta, device: torch.device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Makes the groups of this rank's row of `rows` [groups, ranks] for messages of attention: for
    all of them, and on several nodes another one for those between nodes. All ranks must call it,
    and then `attention.warm_up` on both.
    """
    exchange = _my_group(rows, timeout, device)
    assert exchange is not None
    return exchange, None if processes_per_node(dist.get_world_size()) is None else _my_group(
        rows, timeout, device
    )


def exchange_options(device: torch.device, timeout: timedelta) -> Any:
    """Returns the options of one group for an exchange: on GPUs a stream of high priority, as FSDP
    has, and as many blocks of threads as attention leaves multiprocessors; None for gloo.

    Messages on a stream of normal priority would wait until attention's kernels, which take all of
    a GPU, leave room; more blocks of theirs would wait too. NCCL's group keeps the object, in which
    torch writes its name and ranks: two groups must not share one.
    """
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = SM_MARGIN
    options._timeout = timeout  # torch warns if it differs from the group's
    return options


def _my_group(
    rows: torch.Tensor, timeout: timedelta, exchanging: torch.device | None = None
) -> dist.ProcessGroup | None:
    """Makes a group of the ranks in each of `rows` [groups, ranks], and returns the one that this
    rank is in, if any.

    All ranks must call it with the same rows: every rank makes every group, in the same order.
    `exchanging` is the device of an exchange; None for other groups.
    """
    mine = None
    for members in rows.tolist():
        options = None if exchanging is None else exchange_options(exchanging, timeout)
        group = dist.new_group(members, timeout=timeout, pg_options=options)
        if dist.get_rank() in members:
            mine = group
    return mine
