"""Records of one optimizer step on every rank: weights before it, gradients before the optimizer,
token ids of every call, log.

# A model of transformers, or its PEFT model, before anything wraps it.
with record(model) as seen:
    ...                                      # forward and backward of all micro-batches
    step = seen.step(loss=.., grad_norm=..)  # before clipping, or with a limit out of reach
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .aim import Aim
from .errors import CheckError
from .largest import largest
from .looked import Looked, Output, Parts, keep_parts, look, plain_name
from .probe import END, PAD, Tokens
from .tensors import Tensors, gradients_of, whole
from .tolerances import NAMES, OF, Tolerances, coarsest
from .watched import Asked, Update, Watch

FEWEST_NEIGHBOURS = 16
"""Fewest pairs of neighbouring tokens that tell whether a step was made on a probe."""


SAME_SUM = 1e-9
"""Relative difference of sums of the same weights on two ranks, in float64."""
NEAR_ROW = 0.01
"""Share of an embedding's length by which what a model was called with may differ from it."""


@dataclass
class Step:
    """One optimizer step of one rank, as a trainer made it.

    Attributes:
        reference: a causal LM of transformers, or a PEFT model, with the weights from before the
            step and `eager` attention.
        gradients: of its parameters, by their names in it, before clipping and before the
            optimizer.
        calls: token ids of every call of the model, in order: [rows, tokens] or [tokens].
        loss, grad_norm: as the trainer logged them; None if it did not.
        rows: token ids of batches before they were split over ranks; without, rows are those of
            calls.
        positions: of every call, if it was given some, as the calls or [tokens].
        outputs: every call of the output layer; without, what it got and what backward brought it
            are inferred from its gradient.
        parts: outputs of the parts of layers, to tell the first that is wrong.
        dtype: the coarsest in which weights, hidden states or logits were kept.
        changed_at: number of the first call with other weights than the call before it; 0: none.
        not_finite_in: words for the first part of a layer that is not finite; "": none.
        updates: of the optimizers that are watched.
        aim: how much each prediction should count; without, all targets alike.
        before: gradients that parameters had before the step; none of zeros.
        first_sums: sums of whole parameters at the first call, by name.
    """

    reference: nn.Module
    gradients: Tensors
    calls: Sequence[torch.Tensor]
    loss: float | None = None
    grad_norm: float | None = None
    rows: Sequence[torch.Tensor] = ()
    positions: Sequence[torch.Tensor | None] = ()
    outputs: Sequence[Output] = ()
    parts: Parts = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    changed_at: int = 0
    not_finite_in: str = ""
    updates: Sequence[Update] = ()
    aim: Aim = field(default_factory=Aim)
    before: Tensors = field(default_factory=dict)
    first_sums: dict[str, float] = field(default_factory=dict)


@dataclass
class Recorder:
    """What a model was called with since `record`, and the dtypes that it computed in."""

    model: Any
    reference: nn.Module
    dtypes: set[torch.dtype]
    before: Tensors
    sums: list[list[float]] = field(default_factory=list)
    first_sums: dict[str, float] = field(default_factory=dict)
    calls: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor | None] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    parts: Parts = field(default_factory=dict)
    watches: list[Watch] = field(default_factory=list)

    def watch(
        self,
        optimizer: Any,
        *,
        lr: float | None = None,
        weight_decay: float | None = None,
        max_norm: float | None = None,
        model: Any = None,
    ) -> None:
        """Has what an optimizer does until the end of `record` judged, too; call it before the
        optimizer steps. Settings are those that you mean, `max_norm` the limit of gradients' norm;
        `model`: as of `step`.

        Raises CheckError for what is no optimizer of torch.
        """
        asked = Asked(lr, weight_decay, max_norm=max_norm)
        self.watches.append(Watch(optimizer, model or self.model, asked))

    def step(
        self,
        loss: float | None = None,
        grad_norm: float | None = None,
        rows: Sequence[torch.Tensor] = (),
        model: Any = None,
        aim: Aim | None = None,
    ) -> Step:
        """Returns the step with the gradients that there are now, of `model` if the recorded one
        was replaced by it; `aim`: by default the mean of all targets.

        Collective if parameters are sharded (DTensor).
        """
        pairs = enumerate(pairwise(self.sums), start=1)
        not_finite = (
            name
            for name, outputs in self.parts.items()
            if not all(output.isfinite().all() for output in outputs)
        )
        return Step(
            self.reference,
            gradients_of(model or self.model),
            calls=self.calls,
            loss=loss,
            grad_norm=grad_norm,
            rows=rows,
            positions=self.positions,
            outputs=self.outputs,
            parts=self.parts,
            dtype=coarsest(self.dtypes),
            changed_at=next((at for at, (one, next_one) in pairs if one != next_one), 0),
            not_finite_in=next(not_finite, ""),
            updates=[each.update for each in self.watches],
            aim=aim or Aim(),
            before=self.before,
            first_sums=self.first_sums,
        )


@contextmanager
def record(model: Any) -> Iterator[Recorder]:
    """Records the calls of a model and its weights at the beginning; raises CheckError for what no
    reference can repeat."""
    reference = reference_of(model)
    before = {name: each for name, each in gradients_of(model).items() if each.any()}
    seen = Recorder(model, reference, dtypes=_dtypes_of(model), before=before)

    def see(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = inputs[0] if inputs else named["input"]
        if not seen.first_sums:
            seen.first_sums = _sums_of_all(model, reference)
        if torch.is_autocast_enabled(ids.device.type):
            seen.dtypes.add(torch.get_autocast_dtype(ids.device.type))
        if torch.is_grad_enabled():
            seen.calls.append(whole(ids).cpu())
            seen.sums.append(_sums(model))

    def place(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        positions = named.get("position_ids")
        embedded = named.get("inputs_embeds")
        if torch.is_grad_enabled():
            if embedded is not None and len(seen.calls) == len(seen.positions):
                seen.calls.append(_ids_of(embedded, model))
                seen.sums.append(_sums(model))
            seen.positions.append(
                positions.cpu() if positions is not None and positions.dim() <= 2 else None
            )

    def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], logits: Any) -> None:
        if torch.is_grad_enabled() and logits.requires_grad:
            states = inputs[0] if inputs else named["input"]
            output = Output(states.detach().clone(), logits.detach().clone())
            seen.outputs.append(output)
            seen.dtypes |= {states.dtype, logits.dtype} & OF.keys()
            logits.register_hook(output.add)

    hooks = [model.get_input_embeddings().register_forward_pre_hook(see, with_kwargs=True)]
    hooks.append(model.register_forward_pre_hook(place, with_kwargs=True))
    hooks.append(model.get_output_embeddings().register_forward_hook(keep, with_kwargs=True))
    hooks += keep_parts(model, seen.parts)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for watch in seen.watches:
            watch.remove()


def _ids_of(embedded: torch.Tensor, model: Any) -> torch.Tensor:
    """Returns the ids whose embeddings [rows, tokens, width] a model was called with. Raises
    CheckError for what is no row of its embedding."""
    embeddings = model.get_input_embeddings()
    with torch.no_grad():
        everyones = embeddings(torch.arange(embeddings.weight.shape[0], device=embedded.device))
        rows = embedded.detach().flatten(0, -2).float()
        distances = torch.cdist(rows, everyones.float())
    least, ids = distances.min(1)
    if not bool((least <= NEAR_ROW * rows.norm(dim=1)).all()):
        raise CheckError(
            "the model was called with inputs_embeds that are no rows of its embedding: call it "
            "with input_ids"
        )
    return ids.reshape(embedded.shape[:-1]).cpu()


def _sums_of_all(model: Any, reference: nn.Module) -> dict[str, float]:
    """Returns the sums of all parameters that are whole, as the reference's are, by plain names."""
    shapes = {name: weight.shape for name, weight in reference.named_parameters()}
    found = dict[str, float]()
    for name, weight in model.named_parameters():
        is_whole = type(weight) is nn.Parameter and weight.shape == shapes.get(plain_name(name))
        if is_whole:
            found[plain_name(name)] = float(weight.detach().double().sum())
    return found


def _sums(model: Any) -> list[float]:
    """Returns the sums of the first and the last matrix of a model, which tell whether weights
    changed; none of sharded ones."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = (layer.weight.detach() for layer in layers)
    return [
        float(weight.double().sum())
        for weight in weights
        if type(weight) in (torch.Tensor, nn.Parameter)
    ]


def reference_of(model: Any) -> nn.Module:
    """Returns a copy of the model that runs as plain transformers do, in float64 on the CPU, with
    eager attention.

    Raises CheckError for dropout, dtypes without tolerances, and models that are no causal LM of
    transformers.
    """
    from transformers import AutoModelForCausalLM

    if noisy := [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    ]:
        raise CheckError(
            f"{noisy[0]} drops at random ({len(noisy)} modules): set dropout to 0 in model and "
            "adapters"
        )
    config = getattr(model, "config", None)
    if any(
        value
        for name, value in vars(config or {}).items()
        if "dropout" in name and isinstance(value, float)
    ):
        raise CheckError("the model's config has a dropout above 0: set it to 0")
    if getattr(config, "output_router_logits", False):
        raise CheckError(
            "the loss of routers is another objective: set output_router_logits to False"
        )
    _dtypes_of(model)
    # Adapters that transformers' own add_adapter puts into a model leave it what it is.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        plain: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(base.config), attn_implementation="eager", dtype=torch.float32
        )
        if hasattr(plain, "set_experts_implementation"):
            plain.set_experts_implementation("eager")
    except (ValueError, AttributeError) as error:
        raise CheckError(
            f"{type(base).__name__} is no causal LM that transformers run alone: {error}"
        ) from error
    plain = _with_adapters_of(model, plain)
    missing = plain.load_state_dict(
        {plain_name(name): whole(value) for name, value in model.state_dict().items()}, strict=False
    )
    if missing.missing_keys:
        raise CheckError(
            f"the model lacks {', '.join(missing.missing_keys[:3])}, which its config describes"
        )
    trained = {
        plain_name(name) for name, weight in model.named_parameters() if weight.requires_grad
    }
    for name, weight in plain.named_parameters():
        weight.requires_grad_(name in trained)
    reference: nn.Module = plain.double().eval()
    return reference


def _dtypes_of(model: Any) -> set[torch.dtype]:
    """Returns the dtypes of a model's weights. Raises CheckError for one without tolerances."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    unknown = dtypes - OF.keys()
    if unknown:
        raise CheckError(
            f"weights are {', '.join(sorted(map(str, unknown)))}, for which check-step has no "
            f"tolerances: make them {', '.join(NAMES.values())}"
        )
    return dtypes


def _with_adapters_of(model: Any, plain: Any) -> Any:
    """Returns a plain model with new adapters in the places of those of a model."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return plain
    if hasattr(model, "get_base_model"):
        from peft import get_peft_model

        return get_peft_model(plain, configs["default"])
    for name, config in configs.items():
        plain.add_adapter(copy.deepcopy(config), adapter_name=name)
    plain.set_adapter(model.active_adapters())
    return plain


class Row(NamedTuple):
    """A row of token ids: their numbers in the probe, its rank, its call on it, and positions if
    the call was given some."""

    ids: list[int]
    numbers: list[int]
    rank: int
    call: int
    positions: list[int]


@dataclass
class Record:
    """A step of all ranks on a probe's tokens.

    Attributes:
        gradients: float64, mean of the ranks'.
        apart: names of parameters whose gradients differ between ranks, with the largest difference
            relative to the mean.
        calls: rows of all calls.
        rows: rows of batches before they were split over ranks, if `batched`; else those of calls.
        loss, norm: as a rank logged them.
        looked: what the output layer of each rank shows; None where it does not on all.
        dtype: the coarsest in which a rank computed.
        tolerances: what rounding explains.
        changed_at: number of a rank's first call with other weights; 0: none.
        not_finite_in: words for a rank's first part that is not finite; "": none.
        weights_apart: names of parameters that ranks began the step with different values of.
        updates: of each watched optimizer, every rank's.
        of_ranks: gradients of each rank, where they differ.
        aim: of the first rank.
        before: gradients from before the step, float64, mean of the ranks'; none of zeros.
    """

    tokens: Tokens
    reference: nn.Module
    ranks: int
    gradients: Tensors
    apart: dict[str, float]
    calls: list[Row]
    rows: list[Row]
    batched: bool
    loss: float | None
    norm: float | None
    looked: list[Looked] | None
    dtype: torch.dtype
    tolerances: Tolerances
    changed_at: int
    not_finite_in: str
    weights_apart: list[str]
    updates: list[list[Update]]
    of_ranks: list[Tensors]
    aim: Aim
    before: Tensors

    @property
    def documents(self) -> list[int]:
        """Documents with a token in a call."""
        return sorted(
            {
                self.tokens.document[number]
                for row in self.calls
                for number in row.numbers
                if number >= 0
            }
        )


@dataclass
class _OfRank:
    """What a rank sends of its step: attributes as of Record and Step."""

    gradients: Tensors
    calls: list[Row]
    batches: list[Row]
    looked: Looked | None
    loss: float | None
    norm: float | None
    dtype: torch.dtype
    changed_at: int
    not_finite_in: str
    before: Tensors
    sums: dict[str, float]
    updates: Sequence[Update]
    first_sums: dict[str, float]


def gather(step: Step, tokens: Tokens) -> Record | None:
    """Returns the steps of all ranks as one on the first rank, and None on others. Collective if
    there is a process group.

    Raises, on the first rank, CheckError for calls on other ids than the probe's, and what another
    rank raised meanwhile.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine: _OfRank | Exception
    try:
        mine = _of_this_rank(step, tokens, rank)
    except Exception as error:
        mine = error
    everyones = _at_first_rank(mine)
    if everyones is None:
        return None
    for each in everyones:
        if isinstance(each, Exception):
            raise each
    return _as_one(step, everyones, tokens)


def _of_this_rank(step: Step, tokens: Tokens, rank: int) -> _OfRank:
    looked = look(
        step.outputs,
        step.parts,
        calls=[ids.shape for ids in step.calls],
        config=getattr(step.reference, "config", None),
        limit=OF[step.dtype].objective,
    )
    return _OfRank(
        {name: value.double().cpu() for name, value in step.gradients.items()},
        _called(step, tokens, rank),
        batches=[
            row for call, ids in enumerate(step.rows) for row in _rows(tokens, rank, call, ids)
        ],
        looked=looked,
        loss=step.loss,
        norm=step.grad_norm,
        dtype=step.dtype,
        changed_at=step.changed_at,
        not_finite_in=step.not_finite_in,
        before={name: value.double().cpu() for name, value in step.before.items()},
        sums={
            name: float(weight.detach().sum()) for name, weight in step.reference.named_parameters()
        },
        updates=step.updates,
        first_sums=step.first_sums,
    )


def _as_one(own: Step, everyones: list[_OfRank], tokens: Tokens) -> Record:
    """Returns the record of all ranks; `own`: the first rank's step."""
    called = _with_ends([row for each in everyones for row in each.calls], tokens)
    _require_ids_of_the_probe(called, tokens)
    used = {token for row in called for token in row.ids}
    batched = [row for each in everyones for row in each.batches if set(row.ids) & used]
    mean, apart = _mean([each.gradients for each in everyones])
    before, _ = _mean([each.before for each in everyones])
    dtype = coarsest({each.dtype for each in everyones})
    looked = [each.looked for each in everyones if each.looked is not None]
    return Record(
        tokens,
        own.reference,
        ranks=len(everyones),
        gradients=mean,
        apart=apart,
        calls=called,
        rows=batched or called,
        batched=bool(batched),
        loss=_first(each.loss for each in everyones),
        norm=_first(each.norm for each in everyones),
        looked=looked if len(looked) == len(everyones) else None,
        dtype=dtype,
        tolerances=OF[dtype],
        changed_at=max(each.changed_at for each in everyones),
        not_finite_in=max(each.not_finite_in for each in everyones),
        weights_apart=_weights_apart(everyones),
        before=before,
        updates=_by_optimizer(everyones),
        of_ranks=[each.gradients for each in everyones] if apart else [],
        aim=own.aim,
    )


def _by_optimizer(everyones: list[_OfRank]) -> list[list[Update]]:
    """Returns what all ranks say of each watched optimizer. Raises CheckError for one that made no
    step on a rank, and ranks that watch another number of them."""
    counts = {len(each.updates) for each in everyones}
    if len(counts) > 1:
        raise CheckError(f"ranks watch {min(counts)} to {max(counts)} optimizers: watch as many")
    found = list[list[Update]]()
    for of_one in zip(*(each.updates for each in everyones), strict=True):
        if any(not update.steps for update in of_one):
            raise CheckError(
                "a watched optimizer made no step before the end of `record`: let it step there"
            )
        found.append(list(of_one))
    return found


def _weights_apart(everyones: list[_OfRank]) -> list[str]:
    """Returns the names of parameters that differ between ranks: when recording began, or at the
    first call."""
    first, *others = everyones
    found = list[str]()
    for name, value in first.sums.items():
        at_first_call = first.first_sums.get(name, 0.0)
        for each in others:
            differs = each.sums.get(name) != value
            by = each.first_sums.get(name, at_first_call) - at_first_call
            if differs or not abs(by) <= SAME_SUM * max(1.0, abs(at_first_call)):
                found.append(name)
                break
    return found


def _at_first_rank(mine: Any) -> list[Any] | None:
    """Returns an object of every rank on the first one, and None on others. Collective if there is
    a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyones = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyones)
    return everyones


def of_first_rank(theirs: Any) -> Any:
    """Returns what the first rank gives. Collective if there is a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return theirs
    given = [theirs]
    dist.broadcast_object_list(given)
    return given[0]


def _called(step: Step, tokens: Tokens, rank: int) -> list[Row]:
    """Returns the rows of all calls of a rank's step."""
    if len(step.positions) == len(step.calls):
        positions = step.positions
    else:
        positions = [None] * len(step.calls)
    return [
        row
        for call, (ids, at) in enumerate(zip(step.calls, positions, strict=True))
        for row in _rows(tokens, rank, call=call, ids=ids, positions=at)
    ]


def _with_ends(rows: list[Row], tokens: Tokens) -> list[Row]:
    """Returns rows in which ENDs that do not follow their document, as where it is split in
    zigzag, have their numbers: those whose position only one of them has."""
    held = {number for row in rows for number in row.numbers}
    lasts = [tokens.of(document)[-1] for document in range(len(tokens.probe.lengths))]
    wanted = {
        tokens.place[last]: last for last in lasts if tokens.ids[last] == END and last not in held
    }
    places = Counter(
        position
        for row in rows
        for token, number, position in zip(row.ids, row.numbers, row.positions, strict=False)
        if token == END and number < 0
    )
    found = list[Row]()
    for row in rows:
        numbers = list(row.numbers)
        for at, position in enumerate(row.positions):
            is_end = row.ids[at] == END and numbers[at] < 0
            last = wanted.get(position)
            if is_end and last is not None and places[position] == 1 and last - 1 in held:
                numbers[at] = last
        found.append(row._replace(numbers=numbers))
    return found


def _first(values: Iterable[float | None]) -> float | None:
    """Returns the first number that a rank has."""
    return next((value for value in values if value is not None), None)


def _require_ids_of_the_probe(rows: Sequence[Row], tokens: Tokens) -> None:
    """Raises CheckError for ids that the probe does not have, and for its ids in an order that no
    split of its documents has: such a step was made on other data."""
    known = {PAD, END, *tokens.ids}
    unknown = sorted({token for row in rows for token in row.ids if token not in known})
    if unknown:
        raise CheckError(
            f"id {unknown[0]} was in a call of the model ({len(unknown)} such ids), which the "
            "probe does not have: train on `probe.rows`, and pad with `probe.pad`"
        )
    neighbours = 0
    ordered = 0
    for row in rows:
        for number, after in pairwise(row.numbers):
            if number < 0 or after < 0:
                continue
            neighbours += 1
            ordered += after > number and tokens.document[after] == tokens.document[number]
    if neighbours >= FEWEST_NEIGHBOURS and ordered < neighbours / 4:
        raise CheckError(
            f"of {neighbours} neighbouring tokens only {ordered} are of one document of the probe "
            "and in its order: train on `probe.rows`, not on other data"
        )


def _rows(
    tokens: Tokens, rank: int, call: int, ids: torch.Tensor, positions: torch.Tensor | None = None
) -> Iterator[Row]:
    """Yields the rows of [rows, tokens] or [tokens]. Positions of another length belong to ids that
    the model splits itself."""
    rows = ids.reshape(-1, ids.shape[-1]).tolist()
    at: list[list[int]] = [[] for _ in rows]
    if positions is not None and positions.shape[-1] == ids.shape[-1]:
        at = positions.expand(ids.shape).reshape(-1, ids.shape[-1]).tolist()
    for row, places in zip(rows, at, strict=True):
        yield Row(row, tokens.numbers(row), rank=rank, call=call, positions=places)


def _mean(of_ranks: Sequence[Tensors]) -> tuple[Tensors, dict[str, float]]:
    """Returns the mean gradients of ranks, and how far those that differ are from the first rank's,
    relative to the mean."""
    mean = Tensors()
    apart = dict[str, float]()
    for name in dict.fromkeys(name for gradients in of_ranks for name in gradients):
        found = [gradients.get(name) for gradients in of_ranks]
        mean[name] = torch.stack([each for each in found if each is not None]).sum(0) / len(found)
        if not mean[name].isfinite().all():  # which the verdict says of the mean
            continue
        given = [torch.zeros_like(mean[name]) if each is None else each for each in found]
        most = largest(float((each - given[0]).norm()) for each in given)
        if not most <= 1e-5 * float(mean[name].norm()):
            apart[name] = most / max(float(mean[name].norm()), 1e-30)
    return mean, apart
