"""What a trainer and its model are, asked once. A new trainer of TRL is added to KINDS."""

import ast
import functools
import inspect
import re
import textwrap
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from longctx.data.diffusion import Noise
from longctx.hf.vision import is_vision
from longctx.trainers.pass_through import LIBRARIES, passes_on

Kind = Literal["step", "token_values", "divergence", "hidden_states"]
"""What is planned: whole steps, as the loss is a sum over tokens; or each call of the model, whose
loss needs, of all tokens of its rows, values by TRL's fused head, divergence from a teacher, or
hidden states."""
KINDS: dict[str, Kind] = {
    "SFTTrainer": "step",
    "DPOTrainer": "token_values",
    "GRPOTrainer": "token_values",
    "RLOOTrainer": "token_values",
    "KTOTrainer": "token_values",
    "DistillationTrainer": "divergence",
    "GKDTrainer": "divergence",
    "RewardTrainer": "hidden_states",
}
"""Trainers of TRL. Of `transformers.Trainer` steps are planned, or calls for "hidden_states" if its
loss is another head's or its own."""
OTHER_HEADS = (
    "Classification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForPreTraining",
    "ForNextSentencePrediction",
)
"""Ends of the names of models whose loss is not one of the next token, or of masked ones."""
OUTPUTS = {"logits", "hidden_states", "last_hidden_state", "base_model", "get_output_embeddings"}
"""What a loss may read of models, beside the values of TRL's fused head."""
MODEL = re.compile(r"(^|\.|_)(model|model_wrapped|forward|forward_redirection)$")
"""The end of what is called, if a method calls a model."""
LOSS = ("compute_loss", "training_step")
"""Methods of a subclass that are called for every micro-batch."""


class Traits:
    """A trainer, and what it and its model are before anything is replaced.

    Attributes:
        model: the model of transformers, inside the trainer's model and its adapters.
        adapters: configs of peft, by name.
        trl_class: name of TRL's nearest class that the trainer is or extends; None for others.
        kind: what is planned; of a trainer that is not supported, "step".
        token_sum: whether losses of a subclass are said to be sums over tokens.
        encoder_decoder, images, masked: whether the model is an encoder-decoder, reads images, or
            predicts masked tokens.
        encoder: whether tokens of its base model see later ones.
        diffusion: whether the data collator asks for block diffusion.
        noisy: whether a module drops at random, or NEFTune adds noise.
        balances: whether the auxiliary loss of a mixture's routers is to be trained.
        recomputes, reentrant: whether layers are computed again in backward, and whether in a
            backward pass of their own.
        keeps_scale: whether a trainer of another tool keeps its own means of batches.
        means_of_batches: whether the model, as many that read images, or the trainer itself asks
            for means of batches, though the loss can be a sum over tokens.
    """

    def __init__(self, trainer: Any, token_sum: bool, keeps_scale: bool = False) -> None:
        self.trainer = trainer
        self.keeps_scale = keeps_scale
        self.args = trainer.args
        self.token_sum = token_sum
        self.model = model = inner_model(trainer, trainer.model)
        self.adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
        self.trl_class = _trl_class(trainer)
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        self.images = is_vision(model)
        self.masked = _predicts_masked(model)
        self.encoder = is_encoder(model.base_model)
        self.diffusion = isinstance(getattr(trainer.data_collator, "noise", None), Noise)
        self.kind = self._kind()
        drops = any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
        self.noisy = drops or bool(trainer.neftune_noise_alpha)
        self.recomputes, self.reentrant = _recomputes(self.args, model)
        self.balances = self._balances()
        asks = getattr(model, "accepts_loss_kwargs", None) is False
        self.means_of_batches = not trainer.model_accepts_loss_kwargs and (
            asks or _takes_more(model.forward)
        )

    def _kind(self) -> Kind:
        if self.trl_class:
            return KINDS.get(self.trl_class, "step")
        if self.encoder_decoder or self.images:
            return "step"
        own_method = any(is_own(self.trainer, name) for name in LOSS)
        own_loss = own_method and not self.token_sum
        other_head = (
            type(self.model).__name__.endswith(OTHER_HEADS) or self.model.base_model is self.model
        )
        if own_loss or other_head or self.trainer.compute_loss_func is not None:
            return "hidden_states"
        if self.keeps_scale:
            return "hidden_states"
        return "step"

    def _balances(self) -> bool:
        if getattr(self.trainer, "aux_loss_enabled", False):
            return True
        if self.encoder_decoder:
            return False
        config = self.model.config.get_text_config()
        return bool(getattr(config, "output_router_logits", False))

    @property
    def uses_ddp(self) -> bool:
        """Whether DDP reduces gradients."""
        return self.args.world_size > 1 and not self.trainer.is_fsdp_enabled

    @property
    def finds_unused(self) -> bool:
        """Whether DDP is told to look for weights without a gradient."""
        handler = self.trainer.accelerator.ddp_handler
        return bool(handler and handler.find_unused_parameters)

    @property
    def joins_calls(self) -> bool:
        """Whether calls of a step may be planned together: a backward pass follows each of them,
        and gradients are reduced after the last."""
        plugin = self.trainer.accelerator.gradient_state.plugin_kwargs
        reduces_each = bool(plugin.get("sync_each_batch", False))
        return not reduces_each and not is_own(self.trainer, "training_step")

    @property
    def has_loss_of_head(self) -> bool:
        """Whether a loss is the mean that a head of transformers takes over the labels of a
        batch."""
        return type(self.model).__name__.endswith(OTHER_HEADS) and not self.has_own_loss

    @property
    def has_unknown_loss(self) -> bool:
        """Whether the loss of a batch of rows is a trainer's own, which may or may not be a mean
        over them."""
        if self.trl_class is not None or self.keeps_scale:
            return True
        return any(is_own(self.trainer, name) for name in LOSS)

    @property
    def has_own_loss(self) -> bool:
        """Whether the trainer computes another loss than its model."""
        own = is_own(self.trainer, "compute_loss") or self.trainer.compute_loss_func is not None
        return own or self.trl_class is not None or self.keeps_scale


def _trl_class(trainer: Any) -> str | None:
    """Returns the name of TRL's nearest public class that a trainer is or extends; None for others.

    A class that adds nothing to what a trainer reads of its models, as GMPO to GRPO, is passed
    over.
    """
    kinds = type(trainer).__mro__
    of_trl = [kind for kind in kinds if kind.__module__.startswith("trl.")]
    names = [kind.__name__ for kind in of_trl]
    for place, (kind, name) in enumerate(zip(of_trl, names, strict=True)):
        if name.startswith("_"):
            continue
        supported = [other for other in names[place:] if other in KINDS]
        extends = supported and KINDS[supported[0]] == "token_values"
        if name in KINDS or not extends or reads_models(kind):
            return name
    return None


def reads_models(kind: type) -> bool:
    """Returns whether methods of a class call a model, or read outputs of one, themselves."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return True
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and node.attr in OUTPUTS:
            return True
        if isinstance(node, ast.Call) and MODEL.search(ast.unparse(node.func)):
            return True
    return False


def inner_model(trainer: Any, model: Any) -> Any:
    """Returns the model of transformers inside a model of the trainer and its adapters."""
    inner = trainer.accelerator.unwrap_model(model)
    if not is_of_peft(inner):
        return inner
    tuner = tuner_of(inner)
    return inner.base_model if tuner is None else tuner.model


def tuner_of(unwrapped: Any) -> Any:
    """Returns what peft has put between its own model and that of transformers; None if there is
    nothing, as for prompts."""
    inside = unwrapped.base_model if is_of_peft(unwrapped) else None
    return inside if is_of_peft(inside) else None


def adapted_layer(unwrapped: Any) -> Any:
    """Returns the first layer that has adapters; None if there is none."""
    if not is_of_peft(unwrapped):
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    return next((part for part in unwrapped.modules() if isinstance(part, BaseTunerLayer)), None)


def is_of_peft(model: Any) -> bool:
    return type(model).__module__.startswith("peft.")


def _takes_more(function: Any) -> bool:
    """Returns whether a function takes arguments that it does not name, by which losses of
    transformers get a divisor."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _recomputes(args: Any, model: Any) -> tuple[bool, bool]:
    """Returns whether layers of a model are computed again in backward, and whether torch does so
    by `use_reentrant`.

    What the arguments ask for replaces, when training begins, what is set on the model.
    """
    is_sharded = getattr(args, "fsdp", None)
    sharding = getattr(args, "fsdp_config", None)
    if is_sharded and sharding:
        by_accelerate = sharding.get("activation_checkpointing")
        if by_accelerate:
            return True, False
    own_words = {"every_n_layers", "offload"}  # of transformers; all others are torch's
    if getattr(args, "activation_checkpointing", args.gradient_checkpointing):
        given = (
            getattr(args, "activation_checkpointing_kwargs", args.gradient_checkpointing_kwargs)
            or {}
        )
        torch_arguments = {name: value for name, value in given.items() if name not in own_words}
        return True, bool(torch_arguments) and _is_reentrant(
            functools.partial(checkpoint, **torch_arguments)
        )
    recomputing = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) is True
    ]
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in recomputing]
    return bool(recomputing), any(map(_is_reentrant, functions))


def _is_reentrant(function: Any) -> bool:
    """Returns whether a function that computes layers again does so in a backward pass of its own,
    which is torch's default."""
    while function is not None:
        if function is checkpoint:
            return True
        if isinstance(function, functools.partial):
            asked = function.keywords.get("use_reentrant")
            if asked is not None:
                return bool(asked)
            function = function.func
        else:
            # Of a tool that watches what is computed again.
            function = getattr(function, "__wrapped__", None)
    return False


def is_own(trainer: Any, name: str) -> bool:
    """Returns whether a method of a trainer is not that of transformers or TRL, and not known to
    pass on what it is given."""
    method = getattr(trainer, name, None)
    if method is None:
        return False
    module = getattr(method, "__module__", "")
    return module.split(".")[0] not in LIBRARIES and not passes_on(trainer, name)


def _predicts_masked(model: Any) -> bool:
    """Returns whether a model is an encoder that predicts masked tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def is_encoder(model: Any) -> bool:
    """Returns whether a model, or a base model, is an encoder, whose tokens see later ones."""
    directions = {getattr(module, "is_causal", None) for module in model.modules()} - {None}
    return _predicts_masked(model) or (model.base_model is model and directions == {False})
