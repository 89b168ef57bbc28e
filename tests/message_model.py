"""A model of GPUs that exchange messages, in which ranks that would wait for ever are found in
seconds.

Every rank runs the real attention alone, as on a GPU: on streams that only record what is put on
them, and with communicators that send nothing. That gives a program per rank. `play` runs all
programs with random times. A GPU has a few hardware queues: each begins what its streams were given
in the order in which the host gave it, so that two streams may wait for each other that need not.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention import Mask, RingAttention, exchange, ring_pass
from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.attention.masks import CAUSAL
from longctx.planning.layout import Layout, Placement

INSIDE: Any = "messages"  # names stand for process groups
ACROSS: Any = "messages between nodes"
WEIGHTS = "collectives"
"""The communicators: those of attention, and one for collectives of all ranks, as those of sharded
weights."""
COMPUTATION, BESIDE = "computation", "hops beside it"
"""The streams of a rank that have no communicator."""
QUEUES = 8
"""Hardware queues of a GPU, unless `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise."""


class Meeting(NamedTuple):
    """What takes place once all its ranks are there: a message from the first to the second of two,
    or a collective. `number` counts those of the communicator and ranks."""

    communicator: str
    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Operation:
    """A kernel, or a batch of messages, on a stream of one rank.

    Attributes:
        after: numbers of the rank's operations that have to be over before.
        meetings: what has to take place until it is over, with the rows and the pass that each rank
            takes it for.
    """

    stream: str
    after: frozenset[int]
    meetings: dict[Meeting, tuple[int, str]] = field(default_factory=dict)


Program = list[Operation]
"""The operations of a rank, in the order in which its host gives them to streams."""


class Stream:
    """What torch's streams have of CUDA's, on a recorder: the operations after which the next one
    comes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.after: set[int] = set()

    def wait_stream(self, other: "Stream") -> None:
        self.after |= other.after


class Recorder:
    """Records the program of one rank while torch's streams and messages are replaced."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.program: Program = []
        self.where = ""
        self.computation = Stream(COMPUTATION)
        self.beside = Stream(BESIDE)
        self.current = self.computation
        self.communicators = {name: Stream(name) for name in (INSIDE, ACROSS, WEIGHTS)}
        self.counts: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replaces what torch has of streams, ranks and messages."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "is_initialized": True,
                "get_rank": self.rank,
                "get_world_size": self.ranks,
            }.items():
                patch.setattr(dist, name, lambda *group, value=value: value)
            patch.setattr(dist, "get_global_rank", lambda group, peer: peer)
            patch.setattr(dist, "P2POp", lambda *arguments: arguments)
            patch.setattr(dist, "batch_isend_irecv", self.post)
            patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
            patch.setattr(torch.cuda, "stream", self.inside)
            patch.setattr(exchange, "_stream_beside", lambda device: self.beside)
            patch.setattr(ring_pass, "choose_kernel", lambda name, request: self)
            yield

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.current = stream
        yield
        self.current = before

    def exchange(self, group: Any, where: str) -> "OnGpu":
        """Returns the real exchange, on this recorder."""
        return OnGpu(group, where, self)

    def add(self, stream: Stream, meetings: dict[Meeting, tuple[int, str]]) -> int:
        """Puts an operation on a stream. It comes after what the current stream waits for."""
        number = len(self.program)
        after = frozenset(stream.after | self.current.after)
        self.program.append(Operation(stream.name, after, meetings))
        stream.after = {number}
        return number

    def post(self, operations: list[Any]) -> list["Work"]:
        """Stands for `batch_isend_irecv`."""
        (communicator,) = {group for _, _, _, group in operations}
        meetings = {}
        for operation, tensor, peer, _ in operations:
            ends = (self.rank, peer) if operation is dist.isend else (peer, self.rank)
            meetings[self.meeting(communicator, ends)] = len(tensor), self.where
            if operation is dist.irecv:
                tensor.zero_()
        return [Work(self, self.add(self.communicators[communicator], meetings))]

    def meeting(self, communicator: str, ranks: tuple[int, ...]) -> Meeting:
        number = self.counts[communicator, ranks]
        self.counts[communicator, ranks] += 1
        return Meeting(communicator, ranks, number)

    def collective(self, where: str) -> None:
        """Adds a collective of all ranks, for which the current stream waits."""
        meeting = self.meeting(WEIGHTS, tuple(range(self.ranks)))
        number = self.add(self.communicators[WEIGHTS], {meeting: (1, where)})
        Work(self, number).wait()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Stands for a kernel of attention."""
        self.add(self.current, {})
        return torch.zeros_like(q), q.new_zeros(q.shape[:2])

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
        self.add(self.current, {})
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@dataclass
class Work:
    """Stands for torch's: on NCCL the current stream waits, not the host."""

    recorder: Recorder
    number: int

    def wait(self) -> None:
        self.recorder.current.after.add(self.number)


class OnGpu(Exchange):
    """The real exchange, with hops beside the computation on a stream, as on a GPU."""

    def __init__(self, group: Any, where: str, recorder: Recorder) -> None:
        super().__init__(group, where)
        self.recorder = recorder

    def start(self, outgoing: Any, incoming: Tensor, rows: Rows) -> Pending:
        self.recorder.where = self.where
        return super().start(outgoing, incoming, rows)

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        return super().beside(hops, torch.device("cuda"))


class Gathered(torch.autograd.Function):
    """A collective before a layer, in both passes, as that of its sharded weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: Recorder, where: str) -> Tensor:
        ctx.recorder = recorder
        ctx.where = where
        recorder.collective(f"{where}, forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        ctx.recorder.collective(f"{ctx.where}, backward")
        return dx, None, None


gather: Any = Gathered.apply  # untyped in torch


@dataclass(frozen=True)
class Step:
    """A step of `ranks`: placements in each micro-batch, the length of every document, and what
    else changes the messages."""

    ranks: int
    lengths: tuple[int, ...]
    micro_batches: tuple[tuple[Placement, ...], ...]
    layers: int = 1
    ranks_per_node: int = 8
    keep_kv: bool = False
    mask: Mask = CAUSAL

    def program(self, rank: int) -> Program:
        """Returns what a rank gives to its streams in forward and backward of all micro-batches."""
        recorder = Recorder(rank, self.ranks)
        with recorder.recording():
            for number, placements in enumerate(self.micro_batches):
                attention = RingAttention(
                    Layout.of(placements, self.lengths, number, rank),
                    group=INSIDE,
                    across=ACROSS,
                    ranks_per_node=self.ranks_per_node,
                    keep_kv=self.keep_kv,
                    mask=self.mask,
                    exchange=recorder.exchange,
                )
                x = torch.zeros(attention.layout.tokens, 1, 1, requires_grad=True)
                for layer in range(self.layers):
                    where = f"micro-batch {number}, layer {layer}"
                    x = gather(x, recorder, where)
                    x = attention(lambda sent, x=x: sent(x), x, x, layer)
                x.sum().backward()
        return recorder.program

    def programs(self) -> list[Program]:
        return [self.program(rank) for rank in range(self.ranks)]


class Gpu:
    """The state of one rank in `play`."""

    def __init__(self, program: Program, queue_of: dict[str, int], resident: int | None) -> None:
        self.program = program
        self.resident = resident
        self.begun = [False] * len(program)
        self.over = [False] * len(program)
        self.left = [set(operation.meetings) for operation in program]
        self.running = 0
        """Batches of messages that run."""
        self.queues: dict[int, list[int]] = defaultdict(list)
        for number, operation in reversed(list(enumerate(program))):
            self.queues[queue_of[operation.stream]].append(number)

    def ready(self) -> Iterator[int]:
        """Takes from the queues what can begin, and yields its numbers."""
        for queue in self.queues.values():
            while queue and self.can_begin(self.program[queue[-1]]):
                number = queue.pop()
                self.begun[number] = True
                self.running += bool(self.program[number].meetings)
                yield number

    def can_begin(self, operation: Operation) -> bool:
        """Whether what comes before an operation is over, and multiprocessors are left for its
        messages."""
        if operation.meetings and self.resident is not None and self.running >= self.resident:
            return False
        return all(self.over[number] for number in operation.after)

    def end(self, number: int) -> None:
        self.over[number] = True
        self.running -= bool(self.program[number].meetings)


def play(
    programs: Sequence[Program],
    seed: int,
    *,
    queues: int = QUEUES,
    resident: int | None = None,
) -> list[str]:
    """Runs the programs with random times. Returns what is wrong: operations that never begin or
    end, by rank, and messages that two ranks take for different ones.

    Args:
        seed: of all times, and of the queue of each stream of each rank.
        resident: batches of messages that can run at the same time on a GPU; None: any number.
    """
    random = Random(seed)
    gpus = []
    for program in programs:
        queue_of = {operation.stream: random.randrange(queues) for operation in program}
        gpus.append(Gpu(program, queue_of, resident))
    there: dict[Meeting, list[tuple[int, int]]] = defaultdict(list)  # (rank, operation)
    wrong: list[str] = []
    # (time, rank, operation): of a meeting those of all its ranks.
    events: list[tuple[float, list[tuple[int, int]], Meeting | None]] = []

    def begin(time: float, rank: int) -> None:
        for number in gpus[rank].ready():
            meetings = programs[rank][number].meetings
            if not meetings:
                later = time + random.expovariate(1.0)
                heapq.heappush(events, (later, [(rank, number)], None))
            for meeting, content in meetings.items():
                there[meeting].append((rank, number))
                first_rank, first = there[meeting][0]
                expected = programs[first_rank][first].meetings[meeting]
                if content != expected:
                    wrong.append(f"{meeting}: {content} on rank {rank}, {expected} on {first_rank}")
                if len(there[meeting]) == len(meeting.ranks):
                    later = time + random.expovariate(RATES[meeting.communicator])
                    heapq.heappush(events, (later, there[meeting], meeting))

    for rank in range(len(programs)):
        begin(0.0, rank)
    while events:
        time, ends, meeting = heapq.heappop(events)
        for rank, number in ends:
            gpus[rank].left[number].discard(meeting)
            if not gpus[rank].left[number]:
                gpus[rank].end(number)
        for rank, _ in ends:
            begin(time, rank)
    for rank, gpu in enumerate(gpus):
        waiting = [number for number, over in enumerate(gpu.over) if not over]
        if waiting:
            first = programs[rank][waiting[0]]
            wrong.append(f"rank {rank} waits for ever on the stream of {first.stream}: {first}")
    return wrong


RATES = {INSIDE: 3.0, ACROSS: 0.3, WEIGHTS: 1.0}
"""Messages of each communicator per unit of time, on average; a kernel takes one unit."""


def in_one_queue(programs: Sequence[Program]) -> list[Program]:
    """Returns programs in which an operation comes after the end of all before it: the strictest
    order that a GPU may keep. What never hangs so never hangs in another order, as that has only
    fewer conditions."""
    return [
        [
            replace(operation, after=frozenset(range(max(0, number - 1), number)))
            for number, operation in enumerate(program)
        ]
        for program in programs
    ]
