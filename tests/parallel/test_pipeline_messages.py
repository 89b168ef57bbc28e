"""Messages of pipelines, and of ring attention inside their stages, meet in order; checked without
sending any.

Every rank runs torch's schedule and our stages alone, with stand-ins for torch's messages that only
record them. On NCCL, torch sends a batch over the communicator of its group, but a message without
a batch over a communicator of its two ranks alone: so a message never arrives if only one of its
ends is in a batch, and the order counts on every communicator by itself.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef

from longctx.attention import RingAttention
from longctx.model.decoder import Decoder
from longctx.model.presets import ModelShape
from longctx.parallel.pipeline import Inputs, PipelineRun, Stage
from longctx.planning.layout import Layout, Placement
from longctx.planning.pipeline import Pipeline
from tests.attention.test_exchange_order import Batch, left_over
from tests.marks import examples

ROWS = 6
"""Rows of hidden states in every message between stages."""


@dataclass(frozen=True)
class Group:
    """Stands for a process group of these ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class Message:
    """One end of a message. Shape and name are equal at both ends; the name is pass, receiving
    stage and micro-batch."""

    sender: int
    receiver: int
    shape: tuple[int, ...]
    name: Any


@dataclass
class Post:
    """Messages that a rank posts at once: `batched`, or one alone."""

    group: Group
    batched: bool
    messages: list[Message]

    @property
    def pair(self) -> frozenset[int] | None:
        """The two ranks whose own communicator torch uses; None: that of the group."""
        return (
            None
            if self.batched
            else frozenset((self.messages[0].sender, self.messages[0].receiver))
        )


class Operation:
    """Stands for `dist.P2POp`."""

    def __init__(
        self,
        op: Any,
        tensor: torch.Tensor,
        peer: int | None = None,
        group: Group | None = None,
        tag: Any = 0,
        group_peer: int = -1,
    ) -> None:
        assert group is not None
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        self.peer = group.ranks[group_peer] if peer is None else peer
        self.group_peer = group.ranks.index(self.peer)


@dataclass
class Recorder:
    """Stands for torch's messages on one rank: records them and sends nothing; what it receives is
    0, or 1 in integers."""

    rank: int
    log: list[Post] = field(default_factory=list)
    running: tuple[int, int] = (0, 0)
    """Stage and micro-batch that ran last."""
    unnamed: Message | None = None
    """What was received for the stage that runs next."""
    sent: list[StorageWeakRef] = field(default_factory=list)
    most: int = 0
    """Largest number of tensors sent alone that were alive at once."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, "get_rank", lambda group: group.ranks.index(self.rank))
            patch.setattr(dist, "get_world_size", lambda group: len(group.ranks))
            patch.setattr(dist, "get_global_rank", lambda group, rank: group.ranks[rank])
            patch.setattr(dist, "P2POp", Operation)
            for name in ("isend", "irecv", "send", "recv", "batch_isend_irecv"):
                patch.setattr(dist, name, getattr(self, name))
            for name, step in (("fwd_send", 1), ("fwd_recv", 0), ("bwd_send", -1), ("bwd_recv", 0)):
                patch.setattr(PipelineStage, f"get_{name}_ops", self._named(name, step))
            yield

    def _named(self, name: str, step: int) -> Callable[[PipelineStage, int], list[Operation]]:
        """Returns a stage's method with operations that carry pass, receiving stage and
        micro-batch."""
        method = getattr(PipelineStage, f"get_{name}_ops")

        def operations(stage: PipelineStage, micro_batch: int) -> list[Operation]:
            found: list[Operation] = method(stage, micro_batch)
            for operation in found:
                operation.tag = (name[:3], stage.stage_index + step, micro_batch)
            return found

        return operations

    def batch_isend_irecv(self, operations: list[Operation]) -> list[Any]:
        messages = [
            self._message(one.op == dist.isend, one.tensor, one.peer, one.tag or "ring")
            for one in operations
        ]
        assert len({one.group.name for one in operations}) == 1
        return [self._posted(Post(operations[0].group, True, messages))]

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: Any = 0,
        group_dst: int = -1,
    ) -> Any:
        peer = group.ranks[group_dst] if dst is None else dst
        storage = StorageWeakRef(tensor.untyped_storage())
        self.sent.append(storage)
        self.most = max(self.most, sum(not each.expired() for each in self.sent))
        posted = self._posted(Post(group, False, [self._message(True, tensor, peer, tag)]))

        def wait() -> None:
            # Tags are of torch's schedules.
            assert tag or not storage.expired(), "freed before it was sent"
            posted.wait()

        return SimpleNamespace(wait=wait)

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: Any = None,
        tag: Any = 0,
        group_src: int = -1,
    ) -> Any:
        peer = group.ranks[group_src] if src is None else src
        return self._posted(Post(group, False, [self._message(False, tensor, peer, tag)]))

    def send(self, *given: Any, **named: Any) -> None:
        self.isend(*given, **named)

    def recv(self, *given: Any, **named: Any) -> None:
        self.irecv(*given, **named)

    def runs(self, stage: Stage, given: tuple[torch.Tensor, ...]) -> None:
        """Names the last message that was received without a name: it is for this stage."""
        self.running = stage.index, stage.micro_batch
        if self.unnamed is not None:
            self.unnamed.name, self.unnamed = ("fwd", *self.running), None

    @torch.no_grad()
    def _message(self, sends: bool, tensor: torch.Tensor, peer: int, name: Any) -> Message:
        message = Message(
            *((self.rank, peer) if sends else (peer, self.rank)), tuple(tensor.shape) or (1,), name
        )
        if not sends:
            tensor.fill_(0 if tensor.is_floating_point() else 1)
        if name == 0 and tensor.is_floating_point():  # of `PipelineRun.forward`: others have names
            if sends:
                stage, micro_batch = self.running
                message.name = "fwd", stage + 1, micro_batch
            else:
                self.unnamed = message
        return message

    def _posted(self, post: Post) -> Any:
        self.log.append(post)
        return SimpleNamespace(wait=lambda: None)


@dataclass(frozen=True)
class Run:
    """Steps of a pipeline over a domain; world ranks as in `longctx.parallel.mesh`.

    Attributes:
        domain: ranks of each stage.
        steps: (whether it trains or validates, documents of each micro-batch: lengths and
            placements).
    """

    pipeline: Pipeline
    domain: int
    steps: tuple[tuple[bool, tuple[tuple[tuple[int, ...], tuple[Placement, ...]], ...]], ...]

    def log(self, rank: int) -> list[Post]:
        """Returns what a rank posts."""
        return self.recorded(rank).log

    def recorded(self, rank: int) -> Recorder:
        place, mine = divmod(rank, self.domain)
        column = Group(
            "pipeline", tuple(range(mine, self.pipeline.ranks * self.domain, self.domain))
        )
        domain = Group("exchange", tuple(range(place * self.domain, (place + 1) * self.domain)))
        stages = range(place, self.pipeline.stages, self.pipeline.ranks)
        shape = ModelShape(
            vocab_size=5,
            hidden_size=4,
            intermediate_size=4,
            num_hidden_layers=self.pipeline.stages,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=2,
        )
        model = Decoder(shape, stages)
        mesh = SimpleNamespace(
            pipeline=column,
            device=torch.device("cpu"),
            tensor=SimpleNamespace(size=lambda: 1),
            pipeline_rank=place,
            ends=None,
        )
        recorder = Recorder(rank)
        with recorder.installed():
            held = [Stage(model, index, range(index, index + 1)) for index in stages]
            for stage in held:
                stage.register_forward_pre_hook(recorder.runs)
            run: Any = PipelineRun(model, held, self.pipeline, mesh, ROWS, torch.float32)  # type: ignore[arg-type]  # a stand-in for the mesh
            for trains, micro_batches in self.steps:

                def inputs(
                    number: int, given: Any = micro_batches, trains: bool = trains
                ) -> Inputs:
                    lengths, placements = given[number] if number < len(given) else ((), ())
                    layout = Layout.of(placements, lengths, number, mine)
                    attention = RingAttention(layout, group=domain)  # type: ignore[arg-type]  # a stand-in
                    rows = torch.zeros(layout.tokens, dtype=torch.int64)
                    head = (
                        (lambda x, weight: (x @ weight.T).sum())
                        if trains
                        else (lambda x, weight: x[:, 0])
                    )
                    return Inputs(f"micro-batch {number}", rows, rows, attention, head)

                (run.forward_backward if trains else run.forward)(len(micro_batches), inputs)
        return recorder


@st.composite
def runs(draw: st.DrawFn, chunked: bool) -> Run:
    chunks = draw(st.integers(2, 3)) if chunked else 1
    pipeline, domain = Pipeline(draw(st.integers(2, 4)), chunks), draw(st.integers(1, 2))
    assert pipeline.problem is None

    def micro_batch() -> tuple[tuple[int, ...], tuple[Placement, ...]]:
        split = domain > 1 and draw(st.booleans())
        if split:
            return (draw(st.integers(1, 8)),), (Placement(0, 0, 2),)
        return (draw(st.integers(1, 4)),), (Placement(0, draw(st.integers(0, domain - 1)), 1),)

    steps = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 7)), min_size=1, max_size=2))
    return Run(
        pipeline,
        domain,
        tuple((trains, tuple(micro_batch() for _ in range(count))) for trains, count in steps),
    )


Communicator = Callable[[Post], Hashable]
COMMUNICATORS: dict[str, Communicator] = {
    "as torch does": lambda post: (post.group, post.pair),
    "one per group, as torch does with device_id": lambda post: post.group,
}


def mismatched(logs: list[list[Post]], communicator: Communicator) -> list[Any]:
    """Returns the communicators and directions in which ranks do not receive what is sent to them,
    in order."""
    ends: dict[Any, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for rank, log in enumerate(logs):
        for post in log:
            for message in post.messages:
                key = communicator(post), message.sender, message.receiver
                ends[key][rank == message.receiver].append((message.shape, message.name))
    return [(key, sent, awaited) for key, (sent, awaited) in ends.items() if sent != awaited]


def numbered(log: list[Post], communicator: Communicator) -> list[set[Any]]:
    """Returns the messages of every post of a rank, with their numbers on the communicator."""
    counts: dict[Any, int] = defaultdict(int)
    posts = []
    for post in log:
        posts.append(set())
        for message in post.messages:
            key = communicator(post), message.sender, message.receiver
            posts[-1].add((*key, counts[key]))
            counts[key] += 1
    return posts


@pytest.mark.parametrize("chunked", [False, True])
@given(data=st.data())
@settings(max_examples=examples(12), deadline=None)
def test_messages_of_pipelines_meet(data: st.DataObject, chunked: bool) -> None:
    """Of training and validation, one after the other, with ring attention inside the stages.

    Even if a rank posts only when all that it has posted before has ended, on all communicators:
    then no limit of streams or of a GPU, and no connection that is made when both ends first use
    it, can stop the ranks.
    """
    run = data.draw(runs(chunked))
    logs = [run.log(rank) for rank in range(run.pipeline.ranks * run.domain)]
    for communicator in COMMUNICATORS.values():
        assert mismatched(logs, communicator) == []
        posts = [
            [Batch(None, messages, frozenset()) for messages in numbered(log, communicator)]
            for log in logs
        ]
        assert left_over(posts) == 0


@pytest.mark.parametrize("chunks", [1, 2])
def test_validation_keeps_two_sent_tensors(chunks: int) -> None:
    """However many micro-batches it has: the others have arrived."""
    micro_batches = (((3,), (Placement(0, 0, 1),)),) * 9
    run = Run(Pipeline(3, chunks), 1, ((False, micro_batches),))
    recorders = [run.recorded(rank) for rank in range(3)]
    assert [len(recorder.sent) for recorder in recorders] == [
        9 * chunks,
        9 * chunks,
        9 * (chunks - 1),
    ]
    assert all(recorder.most <= 2 for recorder in recorders)
