"""Meeting: the ranks of one start of a run find each other in a store that may still hold what an
earlier start left there.

torchrun keeps its store when it starts its processes again, and its restart counter cannot identify
a start: a restart because a node joined is not counted, and late agents count from their own start.
So rank 0 draws a name for every start and gives it to each rank that asks. The questions of ranks
that have ended are answered too, and nobody reads the answers.
"""

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from longctx.errors import UserError
from longctx.parallel.environment import Launch
from longctx.units import format_ranks, whole_number

ASKED = "longctx/asked"
"""Key of the names under which ranks have asked, one after the other."""
POLL_S = 0.02


def meet(
    server: Store, rank: int, ranks: int, host: str, timeout_s: float
) -> tuple[Store, list[str | None]]:
    """Returns a store for the ranks that start now, and the host of every rank; None for a rank
    that did not come in time.

    Without rank 0 a rank cannot tell the others from those of an earlier start: their hosts are
    then empty.
    """
    deadline = time.monotonic() + timeout_s
    mine = uuid.uuid4().hex
    if rank > 0:
        server.append(ASKED, mine)  # type: ignore[attr-defined]  # not in the stubs
        try:
            server.wait([f"longctx/{mine}"], timedelta(seconds=timeout_s))
        except DistStoreError:
            return server, [None, *(host if other == rank else "" for other in range(1, ranks))]
    name = mine if rank == 0 else server.get(f"longctx/{mine}").decode()
    store = PrefixStore(f"longctx/{name}", server)
    hosts = [f"host/{other}" for other in range(ranks)]
    store.set(hosts[rank], host)
    if rank == 0:
        _answer(server, store, hosts=hosts, name=mine, deadline=deadline)
    else:
        with suppress(DistStoreError):
            store.wait(hosts, timedelta(seconds=max(POLL_S, deadline - time.monotonic())))
    return store, [store.get(key).decode() if store.check([key]) else None for key in hosts]


def _answer(server: Store, store: Store, hosts: list[str], name: str, deadline: float) -> None:
    """Gives `name` to every rank that asks, until all `hosts` are known."""
    answered = 0
    while not store.check(hosts) and time.monotonic() < deadline:
        asked = server.get(ASKED).decode() if server.check([ASKED]) else ""
        for begin in range(answered, len(asked), len(name)):
            server.set(f"longctx/{asked[begin : begin + len(name)]}", name)
        answered = len(asked)
        time.sleep(POLL_S)


def meet_all(launch: Launch, timeout_s: float) -> Store:
    """Returns the store of a run, as torch makes it, once all processes have put their host's name
    there.

    Raises UserError that names the ranks which have not within the timeout.
    """
    port = os.environ.get("MASTER_PORT", "")
    if port and not 0 < (whole_number(port) or 0) < 1 << 16:
        raise UserError(
            f"the environment variable MASTER_PORT is {port!r}: it must be a number from 1 to 65535"
        )
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if unset:
        raise UserError(
            f"WORLD_SIZE is {launch.world_size}, but {' and '.join(unset)} is not set: start with "
            "torchrun"
        )
    host = os.environ["MASTER_ADDR"]
    timeout = timedelta(seconds=timeout_s)
    # Else torchrun does.
    listens = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        server = TCPStore(
            host,
            int(port),
            launch.world_size,
            listens,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        store, hosts = meet(
            server,
            launch.rank,
            ranks=launch.world_size,
            host=socket.gethostname(),
            timeout_s=timeout_s,
        )
    except (dist.DistError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        listener = "it" if listens else "rank 0 or torchrun"
        raise UserError(
            f"rank {launch.rank} on {socket.gethostname()} cannot meet the others at "
            f"{host}:{port}, where {listener} should listen: {reason}. See the output of rank 0, "
            "and check the address"
        ) from error
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    if missing:
        known = ", ".join(dict.fromkeys(name for name in hosts if name))
        raise UserError(
            f"{format_ranks(missing)} of {launch.world_size} did not join at {host}:{port} within "
            f"{timeout_s:g} s; the others are on {known}. Look at the output of those that are "
            "missing, or raise train.timeout_s if they are slow to start"
        )
    return store
