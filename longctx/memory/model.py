"""Memory model: the bytes that a rank holds at the fullest moment of a step, by what they are for.

A step has few moments that can be the fullest: the loss, the middle of the last block's backward, the end of backward and the
optimizer. Each is added up from what autograd, FSDP2 and ring attention are known to keep, and the largest is the answer. Held
to the allocator's own peak on CPUs by a test.

Not counted: the process itself, its libraries, CUDA's context, the communicators' buffers, what the allocator cannot reuse, and
the workspace of attention kernels for GPUs, whose backward sums gradients of queries in float32 and, where several query
heads share a kv head, may hold those of K and V for every query head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from longctx.config import Config
from longctx.model.spec import ModelSpec
from longctx.parallel.pipeline import layers_of_ranks
from longctx.training.loss import CHUNK_TOKENS
from longctx.training.run_profile import ELEMENT_BYTES

FLOAT32 = 4


@dataclass(frozen=True)
class Load:
    """What the heaviest micro-batch asks of a rank.

    Attributes:
        tokens: rows that the rank holds.
        remote: rows of K and V that it receives from its ring mates, over all exchange stages.
        sent: rows that it sends to them; a row sent to two of them counts twice.
        held: remote rows of the neighbouring exchange stages that are under way at once.
        fullest: remote rows of the stage that has most: so many a kernel works on at a time.
        micro_batches: of the step.
        swapped: rows of documents whose heads are swapped for tokens.
    """

    tokens: int
    remote: int
    sent: int
    held: int
    fullest: int
    micro_batches: int
    swapped: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank at the fullest moment of a step, which is `moment`; the sum of the parts is `total`.

    Attributes:
        parameters, optimizer: shards of the weights (float32, if frozen in the compute dtype) and of their two float32 moments.
        gathered_weights: of other ranks' shards, in the compute dtype.
        gradients: whole until they are reduced, then a shard.
        activations: what forward keeps for backward.
        remote_kv: K and V received from ring mates, copies sent to them, and their gradients in backward.
        working: what one block needs for a moment in backward, or the optimizer for its largest parameter.
        logits: one chunk of the loss.
        pipeline: receive buffers and micro-batches in flight of other pipeline stages.
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
    """Bytes on the fullest rank of `ranks` processes under any of the loads; `fused`: with the fused operations of CUDA."""
    return max(_moments(spec, config, ranks, candidates, fused), key=lambda memory: memory.total)


def fits(spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load], available: int, *, fused: bool) -> bool:
    """Whether an `estimate` would be at most `available` bytes; a no is quick."""
    return all(memory.total <= available for memory in _moments(spec, config, ranks, candidates, fused))


def _moments(spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load], fused: bool) -> Iterator[Memory]:
    for load in candidates:
        for stage in range(config.parallel.pipeline_parallel_size):
            yield from _Step(spec, config, ranks, load, fused, stage).moments()


class _Step:
    """The sizes that the moments of a step are made of, in bytes unless said otherwise; of pipeline rank `stage`."""

    def __init__(self, spec: ModelSpec, config: Config, ranks: int, load: Load, fused: bool, stage: int) -> None:
        self.spec, self.config, self.load, self.fused, self.stage = spec, config, load, fused, stage
        self.first, self.last = stage == 0, stage == config.pipeline.ranks - 1
        self.recompute = config.train.recompute
        # Bytes of a number in the compute dtype.
        self.number = ELEMENT_BYTES[config.train.dtype]
        self.shards = config.parallel.shard_ranks or config.domain(ranks)
        self.split = config.parallel.tensor_parallel_size
        held = layers_of_ranks(spec, config.pipeline, config.batch.tokens_per_rank)[stage]
        # How many blocks this rank has, and the largest, by which all are taken to be.
        self.layers = len(held)
        self.layer = max((spec.layers[number] for number in held), key=lambda layer: layer.parameters)
        self._count_parameters()
        self._measure_block()
        # What all blocks keep for backward, without received K and V; RoPE's cosines and sines are float32, and tokens, labels
        # and positions int64.
        self.tables = load.tokens * (self.layer.head_dim * FLOAT32 + 3 * 8)
        self.activations = self.layers * self.saved + self.tables
        # Received K and V that one layer, and all of them, keep for backward; if attention is repeated, that is one at a time.
        kept_kv = self.kv_row * load.remote if config.context.keep_kv else 0
        self.saved_kv, self.kept_again = (0, kept_kv) if self.recompute == "full" else (kept_kv, 0)
        self.kept = self.layers * self.saved_kv
        on_device = not (config.train.offload_optimizer and fused)
        weights, moments = FLOAT32 * self.trained + self.number * (self.all - self.trained), 2 * FLOAT32 * self.trained
        self.fixed = (
            Memory("", parameters=weights // self.shards, optimizer=moments // self.shards) if on_device else Memory("")
        )
        # Gradients of the micro-batches before this one: whole if they are reduced at the end of the step.
        spread = 1 if config.parallel.reduce_after == "step" else self.shards
        self.earlier_gradients = 0 if load.micro_batches == 1 else FLOAT32 * self.trained // spread

    def _count_parameters(self) -> None:
        """Parameters on this rank, before sharding."""
        layer, adapted = self.layer, self.spec.adapted
        self.block = layer.matrix_parameters // self.split + layer.other_parameters + layer.adapter_parameters
        # One vocabulary matrix.
        self.embedding = self.spec.vocabulary_parameters // self.split
        # Outside of the blocks: the embedding, and the last norm and the head.
        matrices = self.first + self.last - (self.first and self.last and self.spec.tie_word_embeddings)
        self.root = matrices * self.embedding + (self.spec.hidden_size if self.last else 0)
        self.all = self.layers * self.block + self.root
        # Of these, what has gradients and moments: everything, or adapters alone.
        self.trained_block = layer.adapter_parameters if adapted else self.block
        self.trained_root = 0 if adapted else self.root
        self.trained_head = 0 if adapted or not self.last else self.embedding
        self.trained = self.layers * self.trained_block + self.trained_root

    def _measure_block(self) -> None:
        """Activations of one block, by what keeps them."""
        tokens, layer, load, train = self.load.tokens, self.layer, self.load, self.config.train
        # The residual stream.
        self.stream = tokens * self.spec.hidden_size * self.number // self.split
        self.queries = tokens * layer.num_attention_heads * layer.head_dim * self.number // self.split
        # K and V, of one token and of those that the rank holds.
        self.kv_row = 2 * layer.num_key_value_heads * layer.head_dim * self.number // self.split
        self.keys = self.kv_row * tokens
        lse = tokens * layer.num_attention_heads * FLOAT32 // self.split
        # One intermediate of the MLP, over the tokens that are computed at once.
        self.mlp = min(train.mlp_tile_tokens or tokens, tokens) * layer.intermediate_size * self.number // self.split
        # What backward computes again of one tile of the MLP, if it is tiled.
        self.tile = 4 * self.mlp if train.mlp_tile_tokens else 0
        # What a norm keeps: its input, and, where it is composed of simple operations in float32, the normed input, of which
        # the gradient of its weight is made.
        composed = FLOAT32 if self.spec.adapted else 2 * FLOAT32
        kept = self.number if self.fused else composed
        self.norm = tokens * self.spec.hidden_size * kept // self.split
        attention_norms, mlp_norms = (tokens * count * kept // self.split for count in (layer.attention_norms, layer.mlp_norms))
        # The output of a norm, gathered for the matrices that are split over ranks.
        self.normed = self.stream * self.split
        # Gradients of an MLP's output and input over all tokens, where matrices are split over ranks.
        self.gathered_gradients = 2 * self.normed if self.split > 1 else 0
        # What adapters keep beside the input of their layer.
        adapters = tokens * layer.adapter_width * self.number
        # What the first half of a block keeps: norm, q, k, v, out, log-sum-exp.
        self.attention_part = self.norm + self.normed + 2 * self.queries + self.keys + lse + attention_norms + adapters
        # What the second half keeps; a tiled MLP its input alone.
        self.mlp_part = self.norm + self.normed + 4 * self.mlp - self.tile + mlp_norms
        # Share of the rows whose heads are swapped for tokens.
        self.swapped_share = load.swapped / tokens if tokens else 0.0
        # What Ulysses keeps beside `attention_part`: what comes of it, for the next matrix. Where not all rows are swapped,
        # attention runs twice; its second run keeps q, k, v, out and log-sum-exp of its own.
        second = 2 * self.queries + self.keys + lse if self.swapped_share < 1 else 0
        self.swap_part = self.queries + round(self.swapped_share * second) if load.swapped else 0
        # What selective recomputation keeps: out and log-sum-exp; with Ulysses also swapped q, k, v and outputs.
        swapped_in = self.queries + self.keys if self.swapped_share == 1 else 0
        self.operator_outputs = self.queries + lse + self.swap_part + swapped_in
        # What is kept from forward to backward, without received K and V, on the device.
        block_input = 0 if train.offload_activations and self.fused else self.stream
        self.saved = {
            "none": self.attention_part + self.mlp_part + self.swap_part,
            "selective": block_input + self.operator_outputs,
            "full": block_input,
        }[self.recompute]

    def gathered(self, blocks: int) -> int:
        """Weights that are gathered while `blocks` of the blocks are in use."""
        held = blocks if self.config.parallel.reshard_after == "block" else self.layers
        return self.number * (self.root + held * self.block)

    def pipeline(self) -> int:
        """Micro-batches in flight beside the one that is computed, with a buffer for each message that came or comes."""
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
        # Hidden states are there until backward; gradients are used as they come.
        messages = in_flight * (pipeline.chunks - int(self.first)) + pipeline.chunks - int(self.last)
        return round((in_flight - 1) * self.layers * (self.saved + self.saved_kv) + messages * self.stream)

    def moments(self) -> Iterator[Memory]:
        """The moments of the heaviest micro-batch that may be the fullest."""
        moments = [self._last_mlp, self._last_attention]
        if self.recompute == "full":
            moments.append(self._attention_repeated)
        if self.last:
            moments += [self._last_norm, self._loss]
        for moment in (*moments, self._end_of_backward, self._optimizer):
            yield replace(moment(), pipeline=self.pipeline())

    def _in_block(self, moment: str, **parts: int) -> Memory:
        """A moment in the backward of the last block.

        The head's weight has its gradient already; the block's own come on top of earlier ones before they are added.
        """
        fresh = self.number * (self.trained_head + self.trained_block)
        gradients = self.earlier_gradients + fresh
        return replace(self.fixed, moment=moment, gathered_weights=self.gathered(2), gradients=gradients, **parts)

    def _last_mlp(self) -> Memory:
        return self._in_block(
            "backward of the last MLP",
            activations=self.activations,
            working=self._recomputed() + self.tile + 2 * self.mlp + self.stream + self.gathered_gradients,
            remote_kv=self.kept + self.kept_again,
        )

    def _last_attention(self) -> Memory:
        """The MLP part is done with: freed if it was kept, and not computed again."""
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
            "attention repeated in backward",
            activations=self.activations,
            working=self.attention_part + self.queries * FLOAT32 // self.number,
            remote_kv=self.kept + self.kept_again + self._exchanges()[0],
        )

    def _last_norm(self) -> Memory:
        return self._in_block(
            "backward of the last norm",
            activations=self.activations + self.norm,
            working=self.stream + (0 if self.fused else 3 * self.stream * FLOAT32 // self.number),
            remote_kv=self.kept,
        )

    def _loss(self) -> Memory:
        return replace(
            self.fixed,
            moment="loss",
            gathered_weights=self.gathered(1),
            gradients=self.earlier_gradients + (FLOAT32 + self.number) * self.trained_head,
            activations=self.activations + self.stream * int(self.split > 1) + 2 * self.normed + self.norm,
            remote_kv=self.kept,
            logits=self._logits(),
        )

    def _end_of_backward(self) -> Memory:
        """All blocks are done with; the embedding's gradient is there in the compute dtype, gathered, and in float32."""
        return replace(
            self.fixed,
            moment="end of backward",
            gathered_weights=self.gathered(1),
            gradients=self.earlier_gradients + (2 * self.number + FLOAT32) * self.trained_root,
            activations=self.tables + self.normed,
        )

    def _optimizer(self) -> Memory:
        """Not fused, it needs two numbers for each of the largest parameter's."""
        in_host_memory = self.fused and self.config.train.offload_optimizer
        matrix = self.layer.intermediate_size * self.spec.hidden_size
        largest = self.trained_block if self.spec.adapted else max(self.embedding, matrix)
        return replace(
            self.fixed,
            moment="optimizer",
            gradients=0 if in_host_memory else FLOAT32 * self.trained // self.shards,
            working=0 if self.fused else 2 * FLOAT32 * largest,
        )

    def _recomputed(self) -> int:
        """What a block's second forward holds, beside what was saved of the first; 0 if there is none."""
        if self.recompute == "none":
            return 0
        there = self.operator_outputs if self.recompute == "selective" else 0
        if self.fused or self.number == FLOAT32:  # the first norm keeps the block's input itself, not a copy in float32
            there += self.stream
        return self.attention_part + self.swap_part + self.mlp_part - there

    def _attention_backward(self) -> int:
        """Gradients of out, q, k and v, and their sums in float32 where a document is split; or, later, those of a swap."""
        gradients = 2 * self.queries + self.keys
        sums = (self.queries + self.keys) * FLOAT32 // self.number if self.load.remote else 0
        # Gradients of swapped q, k and v on their way back: as they came, sorted, received, joined and in their place.
        swap = round(5 * self.swapped_share * (self.queries + self.keys))
        return max(gradients + sums, swap)

    def _exchanges(self) -> tuple[int, int]:
        """Bytes of K and V in messages: at most in a forward pass, and in a backward pass with the gradients."""
        if not self.load.remote:
            return 0, 0
        at_once = self.load.held / self.load.remote
        received, sent = self.kv_row * self.load.remote, self.kv_row * self.load.sent
        fetched = 0 if self.config.context.keep_kv else received
        # In backward there are gradients of the rows under way, and what a kernel was given of one stage and made of it.
        under_way, computed = (fetched + received + sent) * at_once, 2 * self.kv_row * self.load.fullest
        return round((fetched + sent) * at_once) + self.keys, round(under_way + computed) + self.keys

    def _logits(self) -> int:
        assert self.spec.vocab_size is not None
        each = (5 if self.spec.logit_softcap else 3) * FLOAT32 + (self.number if self.number < FLOAT32 else 0)
        return each * min(CHUNK_TOKENS, self.load.tokens) * self.spec.vocab_size // self.split
