"""Measures latency and bandwidth of the exchange inside and across nodes, and its overlap with attention."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from longctx.attention.exchange import Exchange
from longctx.calibration.computation import Silent, attention_passes
from longctx.calibration.fit import OverlapTime, fit_line, fit_overlap
from longctx.calibration.profiled_run import Measurement, ProfiledRun, layout_of
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh
from longctx.planning.assignment import Assignment
from longctx.planning.cost.model import NANOSECONDS, attention_ns, exchange_ns
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout

LEAST_BYTES = 1 << 20
"""Minimum size of the largest message; times of smaller messages say little about bandwidth."""
MESSAGES = 5
"""Number of consecutive messages timed together, so that the start-up cost weighs less."""
PEERS = 7
"""Maximum number of peers that a rank exchanges with at once; more would not change the result."""
LEAST_ROWS = 64
MOST_LENGTHS = 4
WIDEST_RING = 8


@dataclass(frozen=True)
class Nodes:
    """The nodes of the domain, each with `per_node` consecutive ranks."""

    ranks: int
    per_node: int

    @classmethod
    def find(cls, mesh: Mesh, local_rank: int) -> "Nodes":
        """Finds the nodes from every rank's `local_rank`. Raises UserError if nodes have different numbers of ranks."""
        starts = (mesh.gather([float(local_rank)])[:, 0] == 0).cumsum(0).tolist()
        node = [starts[dist.get_global_rank(mesh.exchange, rank)] for rank in range(mesh.ranks)]
        held = sorted({node.count(number) for number in node})
        if len(held) > 1:
            raise UserError(
                f"nodes have {', '.join(map(str, held))} ranks, but the cost model supports only one number: start the same "
                "number of processes on every node"
            )
        return cls(mesh.ranks, held[0])

    def neighbours(self, rank: int) -> list[tuple[int, int]]:
        """Returns up to PEERS pairs of ranks in the node (to send to, to receive from); all ranks exchange at once."""
        first, place = rank - rank % self.per_node, rank % self.per_node
        shifts = range(1, min(PEERS, self.per_node - 1) + 1)
        return [(first + (place + i) % self.per_node, first + (place - i) % self.per_node) for i in shifts]

    def counterparts(self, rank: int) -> list[tuple[int, int]]:
        """Returns such pairs across nodes: the ranks with the same local rank on other nodes."""
        shifts = range(self.per_node, min(PEERS * self.per_node, self.ranks - self.per_node) + 1, self.per_node)
        return [((rank + i) % self.ranks, (rank - i) % self.ranks) for i in shifts]


def measure_links(profiled: ProfiledRun, nodes: Nodes) -> list[Measurement]:
    """Measures intra_node_bytes_per_s, inter_node_bytes_per_s (where such pairs of ranks exist) and latency_s.

    Every rank exchanges with several others at once, as in ring attention, because that can lower bandwidth per link. Bandwidth
    is fitted to long messages only, as buffers hide the cost of short ones. latency_s is the time of the shortest message,
    the larger one of intra-node and inter-node, times layers and passes.
    """
    links: dict[str, list[tuple[int, int]]] = {}
    if nodes.per_node > 1:
        links["intra_node_bytes_per_s"] = nodes.neighbours(profiled.mesh.rank)
    if nodes.per_node < nodes.ranks:
        links["inter_node_bytes_per_s"] = nodes.counterparts(profiled.mesh.rank)
    row_bytes = profiled.kv_rows(1).nbytes
    most = max(profiled.config.batch.tokens_per_rank, -(-LEAST_BYTES // row_bytes))
    rows = [max(PEERS, most // part) for part in (4096, 16, 4, 1)]  # so that no message is empty
    sizes = [count * row_bytes for count in rows]
    bandwidths, latencies = [], []
    for name, peers in links.items():
        shortest, *others = profiled.time(*(_messages(profiled, count, peers) for count in rows))
        line = fit_line(sizes[1:], [timing.seconds / MESSAGES for timing in others])
        latencies.append((shortest.seconds / MESSAGES, shortest.spread))
        how = f"{sizes[1]:,} to {sizes[-1]:,} bytes, split over {len(peers)} peers, all ranks at once"
        bandwidths.append(Measurement({name: 1 / line.slope}, how, line.residual))
    latency, spread = max(latencies)
    passes = len(profiled.spec.layers) * (profiled.fetches + 1)
    how = f"{latency * 1e6:,.0f} µs for {sizes[0]:,} bytes × {passes} (layers × passes)"
    return [*bandwidths, Measurement({"latency_s": latency * passes}, how, spread)]


def _messages(profiled: ProfiledRun, rows: int, peers: list[tuple[int, int]]) -> Callable[[], None]:
    """Builds an exchange of `rows`, split over `peers`: sent to the first of each pair, received from the second."""
    exchange = Exchange(profiled.mesh.exchange, "longctx calibrate")
    outgoing, incoming = profiled.kv_rows(rows), profiled.kv_rows(rows)
    shares = [len(part) for part in outgoing.tensor_split(len(peers))]
    sends = list(zip((after for after, _ in peers), outgoing.split(shares), strict=True))
    receives = list(zip((before for _, before in peers), shares, strict=True))

    def run() -> None:
        for _ in range(MESSAGES):
            exchange.start(sends, incoming, receives).wait()

    return run


def measure_overlap(profiled: ProfiledRun, nodes: Nodes, profile: HardwareProfile) -> Measurement:
    """Measures overlap: ring attention as in training, compared with attention without messages and messages alone.

    Uses rings inside nodes and rings across nodes, where both exist. Lengths are those at which the exchange takes at least a
    quarter of the attention time, by the constants measured so far; if there are none, the shortest lengths. The number of
    exchange rounds follows from `context.max_remote_tokens`, as in training.
    """
    rank = profiled.mesh.rank
    tried, times = [], []
    inside = nodes.per_node, min(WIDEST_RING, nodes.per_node)
    across = nodes.ranks, min(max(WIDEST_RING, 2 * nodes.per_node), nodes.ranks)
    for among, degree in sorted({inside, across}):
        place = rank % among
        in_ring = place < among // degree * degree  # left-over ranks hold no document
        for rows in _rows(profiled, profile, degree) if degree > 1 else ():
            remote = profiled.config.context.max_remote_tokens
            rounds = degree - 1 if remote is None else min(degree - 1, -(-(degree - 1) * rows // remote))
            layout = layout_of(rank, int(in_ring), rows * degree, degree=degree, ring_index=place % degree, rounds=rounds)
            works = (
                attention_passes(profiled, layout, Silent),
                _all_messages(profiled, layout),
                attention_passes(profiled, layout),
            )
            times.append(OverlapTime(*(timing.seconds for timing in profiled.time(*works))))
            tried.append(f"{rows * degree:,} tokens at degree {degree}")
    overlap, residual = fit_overlap(times)
    return Measurement({"overlap": overlap}, f"attention with and without messages, {', '.join(tried)}", residual)


def _rows(profiled: ProfiledRun, profile: HardwareProfile, degree: int) -> list[int]:
    """Returns the rows per rank at which `measure_overlap` compares."""
    affordable: list[int] = []
    telling: list[int] = []
    rows = min(LEAST_ROWS, profiled.config.batch.tokens_per_rank)
    while rows <= profiled.config.batch.tokens_per_rank:
        lengths, degrees = np.array([rows * degree]), np.array([degree])
        attention = int(attention_ns(profile, lengths, degrees)[0])
        ring = Assignment.alternating(np.array([0]), np.array([0]), degrees)
        exchange = int(exchange_ns(profile, lengths, ring, (1, degree)).max())
        if affordable and attention > profiled.longest_s * len(profiled.spec.layers) * NANOSECONDS:
            break
        affordable.append(rows)
        if 4 * exchange >= attention:
            telling.append(rows)
        rows *= 2
    return telling[-MOST_LENGTHS:] if len(telling) > 1 else affordable[:2]


def _all_messages(profiled: ProfiledRun, layout: Layout) -> Callable[[], None]:
    """Builds a run of one layer's messages in all passes, as in `attention_passes` but without computation."""
    schedule = profiled.attention(layout).schedule
    exchange = Exchange(profiled.mesh.exchange, "longctx calibrate")
    rows = profiled.kv_rows
    rounds = []
    for hop in (hop for round_ in schedule.rounds for hop in round_.hops):
        outgoing = [(peer, rows(len(index))) for peer, index in hop.sends]
        taken = [(peer, rows(count)) for peer, count in hop.receives]
        back = [(peer, len(tensor)) for peer, tensor in outgoing]
        rounds.append((outgoing, rows(hop.received_rows), hop.receives, taken, rows(hop.sent_rows), back))

    def run() -> None:
        for number in range(profiled.fetches):
            for outgoing, incoming, receives, taken, returned, back in rounds:
                exchange.start(outgoing, incoming, receives).wait()
                if number == profiled.fetches - 1:
                    exchange.start(taken, returned, back).wait()

    return run
