"""Memory model: peak memory per rank in bytes, by purpose.

Few moments of a step can be the peak: the loss, the backward of the last block, the end of backward and the optimizer. Each is
summed up from the tensors that autograd, FSDP2 and ring attention keep; the largest sum is the peak. A test compares it with
the allocator's peak on CPUs.

Not counted: the process and its libraries, the CUDA context, communicator buffers and fragmentation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from longctx.config import Config
from longctx.memory.kernels import FLOAT32, kernel_workspace
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work import ELEMENT_BYTES, layers_of_ranks
from longctx.training.loss import tokens_at_once


@dataclass(frozen=True)
class Load:
    """Rows (tokens) that a rank holds, receives and sends in a micro-batch.

    Attributes:
        tokens: rows that the rank holds.
        remote: rows of K and V received from other ranks, over all exchange rounds.
        sent: rows of K and V sent to other ranks; a row sent to two ranks counts twice.
        held: maximum remote rows of consecutive exchange rounds that are in memory at once.
        fullest: remote rows of the largest round, which is the most that a kernel works on at a time.
        micro_batches: number of micro-batches of the step.
        swapped: rows of documents whose heads are swapped for tokens (Ulysses).
        first: whether this is the first micro-batch of the step, before which there are no gradients.
    """

    tokens: int
    remote: int
    sent: int
    held: int
    fullest: int
    micro_batches: int
    swapped: int = 0
    first: bool = False


@dataclass(frozen=True)
class Memory:
    """Peak memory of a rank in bytes: the parts at one `moment` of a step, and their sum `total`.

    Attributes:
        moment: description of the moment.
        parameters: shard of the weights, in float32; frozen weights in the compute dtype.
        optimizer: shard of the two optimizer moments, in float32.
        gathered_weights: weights gathered from all shards, in the compute dtype.
        gradients: whole gradients until they are reduced, then a shard.
        activations: tensors kept from forward for backward.
        remote_kv: K and V received from other ranks, copies sent to them, and gradients of both in backward.
        working: temporary tensors of one block in backward, with the workspace of its attention kernel, or of the optimizer
            for its largest parameter.
        logits: one chunk of the loss.
        pipeline: receive buffers, and activations of further micro-batches in flight.
    """

    moment: str
    parameters: int = 0
    optimizer: int = 0
    gathered_weights: int = 0
    gradients: int = 0
    activations: int = 0
    remote_kv: int = 0
    working: int = 0
    logits: int = 0
    pipeline: int = 0

    @property
    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def to_json(self) -> dict[str, int | str]:
        return {**asdict(self), "total": self.total}


def estimate(spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load], *, fused: bool) -> Memory:
    """Estimates peak memory on the fullest of `ranks` processes under any of the loads; `fused`: CUDA's fused operations."""
    return max(_moments(spec, config, ranks, candidates, fused), key=lambda memory: memory.total)


def fits(spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load], available: int, *, fused: bool) -> bool:
    """Returns whether an `estimate` would be at most `available` bytes; stops at the first moment that exceeds it."""
    return all(memory.total <= available for memory in _moments(spec, config, ranks, candidates, fused))


def _moments(spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load], fused: bool) -> Iterator[Memory]:
    for load in candidates:
        for stage in range(config.parallel.pipeline_parallel_size):
            yield from _Step(spec, config, ranks, load, fused, stage).moments()


class _Step:
    """Sizes of the tensors of a step on pipeline rank `stage`, in bytes unless noted otherwise."""

    def __init__(self, spec: ModelSpec, config: Config, ranks: int, load: Load, fused: bool, stage: int) -> None:
        self.spec, self.config, self.load, self.fused, self.stage = spec, config, load, fused, stage
        self.first, self.last = stage == 0, stage == config.pipeline.ranks - 1
        self.recompute = config.train.recompute
        # Whether a norm is one operation, which keeps only its input.
        self.whole_norms = fused or spec.layer_norm
        # Bytes per element in the compute dtype.
        self.number = ELEMENT_BYTES[config.dtype]
        self.shards = config.parallel.shard_ranks or config.domain(ranks)
        self.split = config.parallel.tensor_parallel_size
        held = layers_of_ranks(spec, config.pipeline, config.batch.tokens_per_rank)[stage]
        # Number of blocks on this rank; all count as large as the largest one.
        self.layers = len(held)
        self.layer = max((spec.layers[number] for number in held), key=lambda layer: layer.parameters)
        self.sends_tokens = self.layer.experts > 0 and config.parallel.expert_parallel_size * self.split > 1
        self._count_parameters()
        self._measure_block()
        # Kept by all blocks for backward, without received K and V. RoPE tables are float32, token tensors int64.
        self.tables = load.tokens * (self.layer.head_dim * FLOAT32 + 3 * 8)
        # Each block of multi-token prediction keeps the later token's embedding, its norms with their outputs, and the gradient
        # from a head; the norm before the main head is kept through its backward.
        predicted = self.spec.predictions * (3 * self.norm + 5 * self.stream)
        self.activations = self.layers * self.saved + self.tables + predicted
        # Received K and V kept for backward per layer and in all layers; if attention is recomputed, one layer at a time.
        kept_kv = self.kv_row * load.remote if config.context.keep_kv else 0
        self.saved_kv, self.kept_again = (0, kept_kv) if self.recompute == "full" else (kept_kv, 0)
        self.kept = self.layers * self.saved_kv
        on_device = not (config.train.offload_optimizer and fused)
        weights, moments = FLOAT32 * self.stored + self.number * (self.all - self.stored), 2 * FLOAT32 * self.stored
        self.fixed = (
            Memory("", parameters=weights // self.shards, optimizer=moments // self.shards) if on_device else Memory("")
        )
        # A pipeline adds up gradients, and reduces them after its last backward.
        alone, in_pipeline = load.micro_batches == 1, config.pipeline.ranks > 1
        self.reduced_at_once = not in_pipeline and (alone or config.parallel.reduce_after == "micro_batch")
        # Gradients of earlier micro-batches: whole if they are reduced at the end of the step.
        kept = self.stored // self.shards if self.reduced_at_once else self.trained
        self.unreduced = 0 if alone and not in_pipeline else FLOAT32 * kept
        self.earlier_gradients = 0 if load.first and not in_pipeline else self.unreduced

    def _count_parameters(self) -> None:
        """Counts the parameters of this rank before sharding."""
        layer, adapted = self.layer, self.spec.adapted
        matrices, experts = layer.matrix_parameters + layer.idle_parameters, layer.expert_parameters
        whole = matrices // self.split + layer.other_parameters + layer.adapter_parameters
        # Experts of other ranks of a group are never here, and those of this rank are sharded over fewer ranks.
        self.block = whole - experts // self.split + experts // self.split // self.config.parallel.expert_parallel_size
        # One vocabulary matrix.
        self.embedding = self.spec.vocabulary_parameters // self.split
        # Outside the blocks: the embedding on the first stage, the last norm and the head on the last stage.
        matrices = self.first + self.last - (self.first and self.last and self.spec.tie_word_embeddings)
        self.root = matrices * self.embedding + (self.spec.norm_parameters if self.last else 0)
        self.positions = self.spec.position_parameters // self.split if self.first else 0
        self.root += self.positions + self.spec.prediction_parameters
        self.all = self.layers * whole + self.root
        # Parameters with gradients and optimizer state: all, or only the adapters.
        self.trained_block = layer.adapter_parameters if adapted else self.block
        self.trained_root = 0 if adapted else self.root
        self.trained_head = 0 if adapted or not self.last else self.embedding
        self.trained = self.layers * self.trained_block + self.trained_root
        # Of which the shards of a rank are a part.
        self.stored = self.trained if adapted else self.all

    def _measure_block(self) -> None:
        """Computes the activations of one block by the operation that keeps them."""
        tokens, layer, load, train = self.load.tokens, self.layer, self.load, self.config.train
        # The residual stream.
        self.stream = tokens * self.spec.hidden_size * self.number // self.split
        self.queries = tokens * layer.num_attention_heads * layer.head_dim * self.number // self.split
        # K and V of one token, and of all tokens on the rank.
        self.kv_row = 2 * layer.num_key_value_heads * layer.head_dim * self.number // self.split
        self.keys = self.kv_row * tokens
        lse = tokens * layer.num_attention_heads * FLOAT32 // self.split
        # Tokens of the MLP that are computed at once; experts that are split over ranks may get more than their even share.
        at_once = round(tokens * self.config.parallel.expert_max_load) if self.sends_tokens else tokens
        at_once = min(train.mlp_tile_tokens or at_once, at_once)
        # One intermediate tensor of the MLP, and its part that is computed in tiles or turns: not an expert of all tokens.
        in_turns = layer.routed_size or layer.intermediate_size
        turn = at_once * in_turns * self.number // self.split
        self.mlp = turn + tokens * (layer.intermediate_size - in_turns) * self.number // self.split
        # Rows on their way into the experts, or out of them, and the router's logits and scores.
        self.routed = tokens * layer.experts_per_token * self.spec.hidden_size * self.number // self.split
        self.routed_at_once = at_once * self.routed // max(1, tokens)
        routing = 3 * tokens * layer.experts * FLOAT32 // self.split
        # Outputs of the MLP's matrices but the last; the activation's, and with a gate its product, are as many again.
        outputs = (layer.mlp_matrices - 1) * self.mlp
        # Recomputed in backward for one tile of the MLP, if it is tiled.
        tiled = 2 * (layer.mlp_matrices - 1) * turn + self.routed_at_once
        self.tile = tiled if train.mlp_tile_tokens else 0
        # Kept by a norm: its input; if it is composed of simple float32 operations also the normalized input, which the weight
        # gradient needs.
        composed = FLOAT32 if self.spec.adapted else 2 * FLOAT32
        kept = self.number if self.whole_norms else composed
        self.norm = tokens * self.spec.hidden_size * kept // self.split
        attention_norms, mlp_norms = (tokens * count * kept // self.split for count in (layer.attention_norms, layer.mlp_norms))
        # Output of a norm, gathered for tensor-parallel matrices.
        self.normed = self.stream * self.split
        # Gradients of the MLP's output and input for all tokens, with tensor parallelism.
        self.gathered_gradients = 2 * self.normed if self.split > 1 else 0
        # Kept by adapters in addition to the input of their layer.
        adapters = tokens * layer.adapter_width * self.number
        # Kept by the first half of a block: norm, q, k, v, out, log-sum-exp.
        self.attention_part = self.norm + self.normed + 2 * self.queries + self.keys + lse + attention_norms + adapters
        # Kept by the second half; a tiled MLP keeps only its input.
        self.mlp_part = self.norm + self.normed + 2 * outputs + self.routed_at_once - self.tile + mlp_norms + routing
        self.mlp_part += self.routed  # outputs of the experts, kept for the gradients of their weights
        # Share of rows whose heads are swapped for tokens.
        self.swapped_share = load.swapped / tokens if tokens else 0.0
        # Kept by Ulysses in addition to `attention_part`: its output, for the next matrix. If only some rows are swapped,
        # attention runs twice, and the second run keeps its own q, k, v, out and log-sum-exp.
        second = 2 * self.queries + self.keys + lse if self.swapped_share < 1 else 0
        self.swap_part = self.queries + round(self.swapped_share * second) if load.swapped else 0
        # Kept by selective recomputation: out and log-sum-exp; with Ulysses also swapped q, k, v and outputs.
        swapped_in = self.queries + self.keys if self.swapped_share == 1 else 0
        self.operator_outputs = self.queries + lse + self.swap_part + swapped_in
        # Kept by recomputation of cheap operations: outputs of the matrices around attention, and of those of the MLP.
        self.around_attention = self.queries + self.keys + self.normed
        self.of_mlp = 0 if train.mlp_tile_tokens else outputs + (self.routed_at_once or self.normed)
        # Kept on the device from forward to backward, without received K and V.
        block_input = 0 if train.offload_activations and self.fused else self.stream
        self.saved = {
            "none": self.attention_part + self.mlp_part + self.swap_part,
            "norms": block_input + self.operator_outputs + self.around_attention + self.of_mlp,
            "mlp": block_input + self.operator_outputs + self.around_attention,
            "selective": block_input + self.operator_outputs,
            "full": block_input,
        }[self.recompute]

    def gathered(self, blocks: int) -> int:
        """Returns the bytes of gathered weights while `blocks` blocks are in use."""
        held = blocks if self.config.parallel.reshard_after == "block" else self.layers
        return self.number * (self.root + held * self.block)

    def pipeline(self) -> int:
        """Returns the bytes of further micro-batches in flight, and of one buffer per pipeline message."""
        pipeline = self.config.pipeline
        if pipeline.ranks == 1:
            return 0
        runs = pipeline.runs(self.load.micro_batches)
        later = pipeline.ranks - 1 - self.stage
        warm_up = {
            "gpipe": float(runs),
            "1f1b": later + 1.0,
        }.get(pipeline.schedule, (2 * later + (pipeline.chunks - 1) * pipeline.ranks) / pipeline.chunks + 1)
        in_flight = min(float(runs), warm_up)
        # Hidden states stay until backward; gradients are consumed on arrival.
        messages = in_flight * (pipeline.chunks - int(self.first)) + pipeline.chunks - int(self.last)
        return round((in_flight - 1) * self.layers * (self.saved + self.saved_kv) + messages * self.stream)

    def moments(self) -> Iterator[Memory]:
        """Yields the moments of the heaviest micro-batch that may be the peak."""
        moments = [self._last_mlp, self._last_attention]
        if self.recompute == "full":
            moments.append(self._attention_repeated)
        if self.last:
            moments += [self._last_norm, self._loss]
        for moment in (*moments, self._end_of_backward, self._optimizer):
            yield replace(moment(), pipeline=self.pipeline())

    def _in_block(self, moment: str, **parts: int) -> Memory:
        """Returns a moment in the backward of a block.

        The gradient of the head already exists; the block's new gradients exist next to the earlier ones until they are added,
        or reduced: then next to those of the block after it, which are being reduced in float32.
        """
        fresh = self.number * (self.trained_head + self.trained_block)
        fresh += FLOAT32 * self.trained_block if self.reduced_at_once and self.layers > 1 else 0
        gradients = self.earlier_gradients + fresh
        return replace(self.fixed, moment=moment, gathered_weights=self.gathered(2), gradients=gradients, **parts)

    def _last_mlp(self) -> Memory:
        return self._in_block(
            "backward of the last MLP",
            activations=self.activations,
            working=self._recomputed() + self.tile + 2 * self.mlp + self.routed + self.stream + self.gathered_gradients,
            remote_kv=self.kept + self.kept_again,
        )

    def _last_attention(self) -> Memory:
        """Returns the moment after the MLP's backward, when its activations are freed."""
        recomputed = self.recompute != "none"
        again = max(0, self._recomputed() - self.mlp_part)
        return self._in_block(
            "backward of the last attention",
            activations=self.activations - (0 if recomputed else self.mlp_part),
            working=again + self._attention_backward() + 2 * self.stream,
            remote_kv=self.kept + self.kept_again + self._exchanges()[1],
        )

    def _attention_repeated(self) -> Memory:
        return self._in_block(
            "recomputed attention in backward",
            activations=self.activations,
            working=self.attention_part + self.queries * FLOAT32 // self.number,
            remote_kv=self.kept + self.kept_again + self._exchanges()[0],
        )

    def _last_norm(self) -> Memory:
        return self._in_block(
            "backward of the last norm",
            activations=self.activations + self.norm,
            working=self.stream + (0 if self.whole_norms else 3 * self.stream * FLOAT32 // self.number),
            remote_kv=self.kept,
        )

    def _loss(self) -> Memory:
        return replace(
            self.fixed,
            moment="loss",
            gathered_weights=self.gathered(1),
            gradients=self.earlier_gradients + FLOAT32 * self.trained_head,
            activations=self.activations + self.stream * int(self.split > 1) + 2 * self.normed + self.norm,
            remote_kv=self.kept,
            logits=self._logits(),
        )

    def _end_of_backward(self) -> Memory:
        """Returns the moment after all blocks, when the gradients outside of them are added or reduced, but not yet freed.

        Weights are not gathered then. If gradients are reduced once per step, those of the blocks are reduced before this
        moment of the last micro-batch.
        """
        root, fresh = FLOAT32 * self.trained_root, self.number * self.trained_root
        copies = 0 if self.fused else 2 * root  # gloo's
        reduced = (fresh if self.reduced_at_once else root) + root + copies
        held = self.unreduced + reduced if self.reduced_at_once else max(self.unreduced + fresh, reduced)
        kept = self.config.parallel.reshard_after == "step" and self.load.micro_batches > 1
        return replace(
            self.fixed,
            moment="end of backward",
            gathered_weights=self.gathered(0) if kept else 0,
            gradients=held,
            activations=self.tables + self.normed,
        )

    def _optimizer(self) -> Memory:
        """Returns the moment of the optimizer, which needs two temporaries of the largest parameter's size if not fused."""
        in_host_memory = self.fused and self.config.train.offload_optimizer
        experts = self.layer.expert_parameters // 3 // self.config.parallel.expert_parallel_size
        matrix = max(self.layer.intermediate_size * self.spec.hidden_size, experts)
        largest = self.trained_block if self.spec.adapted else max(self.embedding, self.positions, matrix)
        return replace(
            self.fixed,
            moment="optimizer",
            gradients=0 if in_host_memory else FLOAT32 * self.stored // self.shards,
            working=0 if self.fused else 2 * FLOAT32 * largest,
        )

    def _recomputed(self) -> int:
        """Returns the bytes that recomputing a block adds to what its first forward kept; 0 without recomputation."""
        if self.recompute == "none":
            return 0
        there = {
            "norms": self.operator_outputs + self.queries + self.keys + min(self.of_mlp, 2 * self.mlp),
            "mlp": self.operator_outputs + self.queries + self.keys,
            "selective": self.operator_outputs,
        }.get(self.recompute, 0)
        if self.whole_norms or self.number == FLOAT32:  # the first norm keeps the block's input itself, not a float32 copy
            there += self.stream
        return self.attention_part + self.swap_part + self.mlp_part - there

    def _attention_backward(self) -> int:
        """Returns the larger of two moments: gradients of out, q, k and v with their float32 sums, or the Ulysses swap."""
        load, gradients = self.load, 2 * self.queries + self.keys
        sums = (self.queries + self.keys) * FLOAT32 // self.number if load.remote else 0
        sums += kernel_workspace(self.config, self.layer, load.tokens, max(load.tokens, load.fullest)) if self.fused else 0
        # Gradients of swapped q, k and v on the way back: computed, sorted, received, concatenated and in place.
        swap = round(5 * self.swapped_share * (self.queries + self.keys))
        return max(gradients + sums, swap)

    def _exchanges(self) -> tuple[int, int]:
        """Returns the maximum bytes of K and V in messages in a forward pass, and with gradients in a backward pass."""
        if not self.load.remote:
            return 0, 0
        at_once = self.load.held / self.load.remote
        received, sent = self.kv_row * self.load.remote, self.kv_row * self.load.sent
        fetched = 0 if self.config.context.keep_kv else received
        # Backward also has gradients of the rows in flight, and a kernel's input and output for one round.
        under_way, computed = (fetched + received + sent) * at_once, 2 * self.kv_row * self.load.fullest
        return round((fetched + sent) * at_once) + self.keys, round(under_way + computed) + self.keys

    def _logits(self) -> int:
        """Returns the bytes that the loss needs next to the head's gradient in float32: of one chunk; of the last one's logits
        and their gradient, while the head's is rounded; or in backward, where the rounded one exists twice.
        """
        assert self.spec.vocab_size is not None
        compiled, rounded = self.config.compiles("cuda" if self.fused else "cpu", self.spec), self.number < FLOAT32
        numbers = min(tokens_at_once(compiled), self.load.tokens) * self.spec.vocab_size // self.split
        with_gradient = 2 * self.number * numbers
        if compiled:
            chunk = with_gradient
        else:
            chunk = (5 if self.spec.logit_softcap else 3) * FLOAT32 * numbers + (with_gradient if rounded else 0)
        head = self.number * self.trained_head
        return max(chunk, with_gradient + (head if rounded else 0), 2 * head - FLOAT32 * self.trained_head)
