"""Router replay in GRPO and RLOO: experts that computed the old log-probabilities, or that the
engine chose while it sampled, are kept with the batch that is trained.

Rounding, other kernels and each step of the optimizer change which experts a router chooses, and
with them the ratio of probabilities that the loss bounds. With "R2" routers use the experts of the
old policy's forward; with "R3" those that a rollout brings, for the old policy, too. References,
generation and losses of balance keep their own choice.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longctx.hf.exactness import replaced
from longctx.trainers.agreement import attempted
from longctx.trainers.expert_replay import Mode, RouterReplay
from longctx.trainers.kinds import Traits, adapted_layer
from longctx.trainers.refusals import TrainerError

Ids = npt.NDArray[np.integer[Any]]
FIELD = "routed_experts"
"""Field of a rollout, and of a batch: ids of experts by token and router, -1 where a router chooses
itself."""
SCORING = "_generate_and_score_completions"
"""Method of trainers that compute old log-probabilities."""


def replay_of(traits: Traits, mode: Mode | None) -> RouterReplay | None:
    """Returns the replay of a trainer's routers; None without a mode. Raises TrainerError for
    trainers that have no experts to replay, and models whose routers cannot be replayed."""
    if mode is None:
        return None
    name = type(traits.trainer).__name__
    if traits.kind != "token_values" or not hasattr(traits.trainer, SCORING):
        raise TrainerError(
            f"router_replay is {mode!r}, but {name} computes no old log-probabilities: omit it, or "
            "use GRPOTrainer or RLOOTrainer"
        )
    if mode == "R3" and getattr(traits.trainer, "rollout_func", None) is None:
        raise TrainerError(
            f"router_replay is 'R3', but no rollout brings {FIELD}: give GRPOTrainer a "
            "rollout_func that returns them, or set router_replay='R2'"
        )
    return RouterReplay(traits, mode)


def notes_on_replay(traits: Traits) -> Iterator[str]:
    """Yields a line on a replay of the old policy that changes nothing."""
    args = traits.args
    batches = getattr(args, "steps_per_generation", 1) * getattr(args, "num_iterations", 1)
    trained_once = args.gradient_accumulation_steps % batches == 0
    if trained_once and not getattr(args, "use_vllm", False):
        yield (
            "note: router_replay='R2' changes nothing: completions are trained once, by the policy "
            "that made them"
        )


def experts_of_rollout(output: Mapping[str, Any], replay: RouterReplay) -> list[Ids]:
    """Returns the experts of every completion of a rollout, prompt included, [tokens, routers *
    top_k]. Raises TrainerError for others than the model's."""
    brought = output.get(FIELD)
    if brought is None:
        raise TrainerError(
            f"rollout_func returns no {FIELD}, which router_replay='R3' needs: return ids "
            "[tokens, layers, experts] of every prompt with its completion, as vLLM's "
            "enable_return_routed_experts gives them"
        )
    rows = []
    parts = zip(brought, output["prompt_ids"], output["completion_ids"], strict=True)
    for experts, prompt, completion in parts:
        tokens = len(prompt) + len(completion)
        rows.append(_checked_row(np.asarray(experts), tokens, replay))
    return rows


def _checked_row(experts: Ids, tokens: int, replay: RouterReplay) -> Ids:
    """Returns the experts of a sequence, -1 for its last token, which an engine may not have
    read."""
    layers = replay.routers.layers
    mixtures = len(replay.routers.modules)
    is_known = experts.ndim == 3 and experts.shape[2] == replay.top_k
    if not is_known or experts.shape[1] not in (layers, mixtures):
        raise TrainerError(
            f"{FIELD} of {list(experts.shape)} do not fit {layers} layers, {mixtures} of them with "
            f"{replay.top_k} experts a token: return [tokens, layers, experts]"
        )
    brought = len(experts)
    if brought not in (tokens, tokens - 1):
        raise TrainerError(
            f"{FIELD} has {brought:,} tokens, but prompt and completion {tokens:,}: return those "
            "of both, with or without the last token"
        )
    if experts.shape[1] != mixtures:
        experts = experts[:, replay.routers.places]
    lowest = experts.min(initial=0)
    highest = experts.max(initial=0)
    if lowest < -1 or highest >= replay.count:
        raise TrainerError(
            f"{FIELD} has {lowest} to {highest}, but the model has {replay.count} experts: return "
            "ids from 0, or -1 for the router's own"
        )
    row = np.full((tokens, replay.width), -1, np.int16)
    row[:brought] = experts.reshape(brought, -1)
    return row


def placed(rows: Sequence[Ids], mask: torch.Tensor) -> torch.Tensor:
    """Returns values of rows, each [tokens, values], where a mask has their tokens, [*mask.shape,
    values]; -1 elsewhere."""
    width = rows[0].shape[1]
    values = torch.full((*mask.shape, width), -1, dtype=torch.int16)
    for place, row in enumerate(rows):
        kept = mask[place].bool().cpu()
        values[place, kept] = torch.from_numpy(row[: int(kept.sum())])
    return values


class Replaying:
    """Mixin before a trainer's class: it keeps experts with a batch, and trains by them."""

    replay: RouterReplay
    _scores = False
    """Whether old log-probabilities are being computed."""
    _of_policy: torch.Tensor | None = None
    _of_rollout: list[Ids] | None = None

    def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
        own: Any = super()
        self._of_policy = None
        with replaced(self, "_scores", True), self._watched_rollout():
            output = own._generate_and_score_completions(inputs)
        experts = self._of_policy
        if self._of_rollout is not None:
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
            experts = placed(self._of_rollout, mask)
        if experts is not None:
            output[FIELD] = experts
        return output

    @contextmanager
    def _watched_rollout(self: Any) -> Iterator[None]:
        """Takes experts from what a rollout returns, meanwhile."""
        if self.replay.mode != "R3":
            yield
            return
        own = self.rollout_func

        def watched(prompts: Any, trainer: Any) -> dict[str, Any]:
            """Collective."""
            output = dict(own(prompts, trainer))
            rows, failed = attempted(lambda: experts_of_rollout(output, self.replay), [])
            if self.dynamic.group is not None:
                self.dynamic.end_all(failed)
            elif failed is not None:
                raise failed
            self._of_rollout = rows
            del output[FIELD]
            return output

        with replaced(self, "rollout_func", watched):
            yield

    def _get_per_token_logps_and_entropies(self: Any, model: Any, *given: Any, **named: Any) -> Any:
        own: Any = super()
        with self._replaying(model, given[1]):
            return own._get_per_token_logps_and_entropies(model, *given, **named)

    @contextmanager
    def _replaying(self: Any, model: Any, mask: torch.Tensor) -> Iterator[None]:
        """Goes around calls for rows, whose tokens a mask has."""
        replay = self.replay
        if not self._scores or not self._is_policy(model):
            yield
        elif replay.mode == "R3":
            with replaced(replay, "given", placed(self._of_rollout, mask)):
                yield
        else:
            with replaced(replay, "kept", []):
                yield
                self._of_policy = torch.cat(replay.kept)

    def _is_policy(self: Any, model: Any) -> bool:
        """Returns whether a model is that which is trained, not its reference, which may be the
        same without adapters, or with others."""
        if model is not self.model:
            return False
        layer = adapted_layer(self.accelerator.unwrap_model(model))
        return layer is None or not (layer.disable_adapters or "ref" in layer.active_adapters)

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        own: Any = super()
        with replaced(self.replay, "given", inputs.get(FIELD)):
            return own._compute_loss(model, inputs)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Lets routers choose again after backward, in which layers may be recomputed."""
        own: Any = super()
        try:
            return own.training_step(model, inputs, num_items_in_batch)
        finally:
            self.replay.begin_with(None)
