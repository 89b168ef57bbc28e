"""Routers of a mixture that use given experts, instead of those of their highest scores.

Experts are replaced where a router calls `topk` over the scores of all experts. So weights of
experts, and their gradients, are the router's own. A trial of the model at the start tells whether
it computes by the experts that its routers are given; other models are refused.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from longctx.data.packing import MicroBatch
from longctx.hf.exactness import evaluating, replaced
from longctx.hf.model import block_name
from longctx.trainers.kinds import Traits
from longctx.trainers.planned_call import Compute
from longctx.trainers.prepared import replaced_method
from longctx.trainers.refusals import TrainerError
from longctx.trainers.riders import Carrier

Mode = Literal["R2", "R3"]
"""Whose experts are replayed, by verl's names: those of the trained model before it was trained, or
of the engine that sampled."""
ROUTER = re.compile("Router|Gate$")
"""In the names of classes of routers."""
EXPERTS = re.compile("Experts$")
PROBED = 8
"""Tokens that routers are tried on."""


class Choosing(TorchFunctionMode):
    """Makes `topk` over the scores of experts choose the given ones.

    Attributes:
        experts: ids [tokens, top_k]; -1: the router's own.
    """

    def __init__(self, experts: torch.Tensor) -> None:
        super().__init__()
        self.experts = experts

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        found = function(*args, **named)
        if function not in (torch.topk, torch.Tensor.topk):
            return found
        if found.indices.shape != self.experts.shape:
            return found  # of groups of experts
        scores = args[0]
        is_own = self.experts < 0
        chosen = torch.where(is_own, found.indices, self.experts)
        values = scores.gather(-1, chosen)
        return torch.return_types.topk((values, chosen))


class Routers(NamedTuple):
    """The routers of a model.

    Attributes:
        modules: in the order of the model's layers.
        places: places of their layers.
        layers: number of layers of the model.
    """

    modules: list[nn.Module]
    places: list[int]
    layers: int

    @classmethod
    def of(cls, model: Any) -> "Routers":
        """Raises TrainerError for models without experts, or experts without one router."""
        blocks = model.get_submodule(block_name(model))
        modules = []
        places = []
        for place, block in enumerate(blocks):
            for parent in block.modules():
                children = list(parent.children())
                if not _are_named(children, EXPERTS):
                    continue
                found = _are_named(children, ROUTER)
                if len(found) != 1:
                    raise TrainerError(
                        f"{type(parent).__name__} has {len(found)} routers beside its experts, but "
                        "one can be replayed: omit router_replay"
                    )
                modules.append(found[0])
                places.append(place)
        if not modules:
            raise TrainerError(
                f"{type(model).__name__} has no experts that routers choose: omit router_replay"
            )
        return cls(modules, places, layers=len(blocks))

    @property
    def name(self) -> str:
        """The name of their class."""
        return type(self.modules[0]).__name__


def _are_named(modules: list[nn.Module], pattern: re.Pattern[str]) -> list[nn.Module]:
    return [module for module in modules if pattern.search(type(module).__name__)]


class RouterReplay(Carrier):
    """Replays the routers of a trainer's model.

    Attributes:
        mode: whose experts are replayed.
        routers: those of the model.
        top_k: experts of a token.
        count: experts that a router scores.
        rows: experts of the micro-batch that runs [tokens, routers, top_k]; None: routers choose.
        chosen: the experts in the call that runs, by router; None: they are not kept.
        given: experts of the rows of the next calls [rows, tokens, routers * top_k]; None: routers
            choose.
        kept: experts that routers chose in calls, as `given`; None: they are not kept.
    """

    rows: torch.Tensor | None = None
    count = 0
    chosen: dict[int, torch.Tensor] | None = None
    given: torch.Tensor | None = None
    kept: list[torch.Tensor] | None = None

    def __init__(self, traits: Traits, mode: Mode) -> None:
        """Raises TrainerError for models whose routers cannot be replayed."""
        self.mode = mode
        self.device = traits.args.device
        self.routers = Routers.of(traits.model)
        self.top_k = self._checked(traits.model)

    @property
    def width(self) -> int:
        """Number of experts of a token in all layers."""
        return len(self.routers.modules) * self.top_k

    @contextmanager
    def used_by(self, model: Any) -> Iterator[None]:
        with ExitStack() as undo:
            for number, router in enumerate(self.routers.modules):
                routed = partial(self._routed, number)
                undo.enter_context(replaced_method(router, "forward", routed))
            yield

    def _routed(
        self, number: int, own: Callable[..., Any], router: Any, *arguments: Any, **named: Any
    ) -> Any:
        """Returns the output of a router: scores of experts, weights, and ids."""
        route = partial(own, router, *arguments, **named)
        if self.rows is None:
            output = route()
        else:
            experts = self.rows[:, number]
            with Choosing(experts):
                output = route()
            assert output[2].shape == experts.shape, "experts of another batch"
        if self.chosen is not None:
            self.chosen[number] = output[2]
            self.count = output[0].shape[-1]
        return output

    def begin_with(self, carried: torch.Tensor | None) -> None:
        """Gets ready for a micro-batch with experts [tokens, routers * top_k]."""
        self.rows = None
        if carried is None:
            return
        rows = carried.to(self.device, torch.int64)
        if not len(rows):  # a rank without tokens has a row of padding
            rows = rows.new_full((1, self.width), -1)
        self.rows = rows.unflatten(1, (-1, self.top_k))

    def taken(self, rows: int) -> torch.Tensor | None:
        """Returns the experts of the next rows of a batch."""
        given = self.given
        if given is None:
            return None
        self.given = given[rows:]
        return given[:rows]

    def watched(self, compute: Compute) -> Compute:
        """Returns a function that computes the same values of a micro-batch, and after them, if
        they are kept, ids of experts."""
        if self.kept is None:
            return compute

        def with_experts(batch: MicroBatch, call: int) -> torch.Tensor:
            with replaced(self, "chosen", {}):
                values = compute(batch, call)
                experts = self._experts_of_call().flatten(1)
            return torch.cat([values, experts.to(values.dtype)], -1)

        return with_experts

    def _experts_of_call(self) -> torch.Tensor:
        """Returns the experts that routers have chosen [tokens, routers, top_k]."""
        assert self.chosen is not None
        by_router = [self.chosen[number] for number in range(len(self.routers.modules))]
        return torch.stack(by_router, 1)

    def kept_of(self, values: torch.Tensor) -> torch.Tensor:
        """Keeps the experts of a batch, if they are kept, and returns its other values."""
        if self.kept is None:
            return values
        experts = values[..., -self.width :]
        self.kept.append(experts.to(torch.int16))
        return values[..., : -self.width]

    def _checked(self, model: Any) -> int:
        """Returns the number of experts of a token. Raises TrainerError unless routers use, and
        layers compute by, the experts that they are given."""
        name = f"the routers of {type(model).__name__} ({self.routers.name})"
        try:
            with torch.no_grad(), evaluating(model), self.used_by(model):
                plain, own = self._tried(model)
                backwards = own.flip(-1)
                hidden, used = self._tried(model, backwards)
                others = (own + 1) % self.count
                shifted, used_others = self._tried(model, others)
        except Exception as error:  # routers may return and take anything
            raise TrainerError(
                f"{name} cannot be replayed ({type(error).__name__}: {str(error)[:120]}): omit "
                "router_replay"
            ) from error
        uses = torch.equal(used, backwards) and torch.equal(used_others, others)
        same = torch.allclose(hidden, plain, rtol=1e-4, atol=1e-5)
        if not uses or not same or torch.equal(shifted, plain):
            raise TrainerError(
                f"{name} do not choose experts by topk of their scores alone: omit router_replay"
            )
        return own.shape[-1]

    def _tried(
        self, model: Any, experts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden states of a call with given experts, and those that routers chose [tokens,
        routers, top_k]."""
        ids = torch.arange(PROBED, device=next(model.parameters()).device)
        with replaced(self, "rows", experts), replaced(self, "chosen", {}):
            output = model.base_model(input_ids=ids[None], use_cache=False)
            return output[0], self._experts_of_call()
