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
from longctx.model.spec import LayerSpec, ModelSpec
from longctx.parallel.pipeline import layers_of_ranks
from longctx.training.loss import CHUNK_TOKENS

FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}


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
        parameters, optimizer: float32 shards of the weights and of their two moments.
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


@dataclass(frozen=True)
class _Step:
    """The sizes that the moments of a step are made of, in bytes unless said otherwise; of pipeline rank `stage`."""

    spec: ModelSpec
    config: Config
    ranks: int
    load: Load
    fused: bool
    stage: int

    @property
    def number(self) -> int:
        """Bytes of a number in the compute dtype."""
        return BYTES[self.config.train.dtype]

    @property
    def shards(self) -> int:
        return self.config.parallel.shard_ranks or self.config.domain(self.ranks)

    @property
    def split(self) -> int:
        return self.config.parallel.tensor_parallel_size

    @property
    def held(self) -> list[LayerSpec]:
        """Blocks of this rank."""
        numbers = layers_of_ranks(self.spec, self.config.pipeline, self.config.batch.tokens_per_rank)[self.stage]
        return [self.spec.layers[number] for number in numbers]

    @property
    def layers(self) -> int:
        return len(self.held)

    @property
    def layer(self) -> LayerSpec:
        """The largest of them, by which all are taken to be."""
        return max(self.held, key=lambda layer: layer.parameters)

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.config.pipeline.ranks - 1

    @property
    def block(self) -> int:
        """Parameters of a block on this rank, before sharding."""
        return self.layer.matrix_parameters // self.split + self.layer.other_parameters

    @property
    def embedding(self) -> int:
        """Parameters of one vocabulary matrix on this rank, before sharding."""
        return self.spec.vocabulary_parameters // self.split

    @property
    def root(self) -> int:
        """Parameters outside of the blocks: those of the embedding, and of the last norm and the head."""
        tied = self.spec.tie_word_embeddings
        matrices = int(self.first) + int(self.last) - int(self.first and self.last and tied)
        return matrices * self.embedding + (self.spec.hidden_size if self.last else 0)

    @property
    def all(self) -> int:
        return self.layers * self.block + self.root

    # Activations of one block, by what keeps them.

    @property
    def stream(self) -> int:
        """The residual stream."""
        return self.load.tokens * self.spec.hidden_size * self.number // self.split

    @property
    def queries(self) -> int:
        return self.load.tokens * self.layer.num_attention_heads * self.layer.head_dim * self.number // self.split

    @property
    def keys(self) -> int:
        """K and V of the tokens that a rank holds."""
        return self.kv_row * self.load.tokens

    @property
    def kv_row(self) -> int:
        return 2 * self.layer.num_key_value_heads * self.layer.head_dim * self.number // self.split

    @property
    def mlp(self) -> int:
        """One intermediate of the MLP, over the tokens that are computed at once."""
        tile = self.config.train.mlp_tile_tokens or self.load.tokens
        return min(tile, self.load.tokens) * self.layer.intermediate_size * self.number // self.split

    @property
    def lse(self) -> int:
        return self.load.tokens * self.layer.num_attention_heads * FLOAT32 // self.split

    @property
    def norm(self) -> int:
        """What a norm keeps: its input, and, where it is composed of simple operations in float32, the normed input."""
        return self.stream if self.fused else 2 * self.stream * FLOAT32 // self.number

    @property
    def normed(self) -> int:
        """The output of a norm, gathered for the matrices that are split over ranks."""
        return self.stream * self.split

    @property
    def gathered_gradients(self) -> int:
        """Gradients of an MLP's output and input over all tokens, where matrices are split over ranks."""
        return 2 * self.normed if self.split > 1 else 0

    @property
    def attention_part(self) -> int:
        """What the first half of a block keeps: norm, q, k, v, out, log-sum-exp."""
        return self.norm + self.normed + 2 * self.queries + self.keys + self.lse

    @property
    def mlp_part(self) -> int:
        """What the second half keeps; a tiled MLP its input alone."""
        return self.norm + self.normed + 4 * self.mlp - self.tile

    @property
    def tile(self) -> int:
        """What backward computes again of one tile of the MLP, if it is tiled."""
        return 4 * self.mlp if self.config.train.mlp_tile_tokens else 0

    @property
    def kept_kv(self) -> int:
        """Received rows that one layer holds until its backward."""
        return self.kv_row * self.load.remote if self.config.context.keep_kv else 0

    @property
    def saved(self) -> int:
        """What one block keeps from forward to backward, without received K and V, on the device."""
        mode = self.config.train.recompute
        if mode == "none":
            return self.attention_part + self.mlp_part + self.swap_part
        block_input = 0 if self.config.train.offload_activations and self.fused else self.stream
        return block_input + (self.operator_outputs if mode == "selective" else 0)

    @property
    def swapped_share(self) -> float:
        """Share of a rank's rows whose heads are swapped for tokens."""
        return self.load.swapped / self.load.tokens if self.load.tokens else 0.0

    @property
    def swap_part(self) -> int:
        """What Ulysses keeps beside `attention_part`: what comes of it, for the next matrix.

        Where not all rows are swapped, attention runs twice; its second run keeps q, k, v, out and log-sum-exp of its own.
        """
        if not self.load.swapped:
            return 0
        second = 2 * self.queries + self.keys + self.lse if self.swapped_share < 1 else 0
        return self.queries + round(self.swapped_share * second)

    @property
    def operator_outputs(self) -> int:
        """What selective recomputation keeps: out and log-sum-exp; with Ulysses also swapped q, k, v and outputs."""
        swapped_in = round(self.swapped_share * (self.queries + self.keys)) if self.swapped_share == 1 else 0
        return self.queries + self.lse + self.swap_part + swapped_in

    @property
    def saved_kv(self) -> int:
        return self.kept_kv if self.config.train.recompute != "full" else 0

    @property
    def tables(self) -> int:
        """RoPE's cosines and sines, float32; tokens, labels and positions, int64."""
        return self.load.tokens * (self.layer.head_dim * FLOAT32 + 3 * 8)

    # Weights and gradients.

    @property
    def fixed(self) -> Memory:
        on_device = not (self.config.train.offload_optimizer and self.fused)
        shard = FLOAT32 * self.all // self.shards if on_device else 0
        return Memory("", parameters=shard, optimizer=2 * shard)

    @property
    def whole_gradients(self) -> bool:
        return self.config.parallel.reduce_after == "step"

    @property
    def earlier_gradients(self) -> int:
        """Gradients of the micro-batches before this one."""
        if self.load.micro_batches == 1:
            return 0
        return FLOAT32 * self.all // (1 if self.whole_gradients else self.shards)

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
        if self.config.train.recompute == "full":
            moments.append(self._attention_repeated)
        if self.last:
            moments += [self._last_norm, self._loss]
        for moment in (*moments, self._end_of_backward, self._optimizer):
            yield replace(moment(), pipeline=self.pipeline())

    @property
    def activations(self) -> int:
        """What all blocks keep for backward."""
        return self.layers * self.saved + self.tables

    @property
    def kept(self) -> int:
        """Received K and V that all blocks keep for backward."""
        return self.layers * self.saved_kv

    @property
    def kept_again(self) -> int:
        """Received K and V that a block which repeats its attention keeps for its own backward."""
        return self.kept_kv if self.config.train.recompute == "full" else 0

    def _in_block(self, moment: str, **parts: int) -> Memory:
        """A moment in the backward of the last block.

        The head's weight has its gradient already; the block's own come on top of earlier ones before they are added.
        """
        fresh = self.number * (self.embedding * int(self.last) + self.block)
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
        recomputed = self.config.train.recompute != "none"
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
            gradients=self.earlier_gradients + (FLOAT32 + self.number) * self.embedding,
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
            gradients=self.earlier_gradients + (2 * self.number + FLOAT32) * self.root,
            activations=self.tables + self.normed,
        )

    def _optimizer(self) -> Memory:
        """Not fused, it needs two numbers for each of the largest parameter's."""
        in_host_memory = self.fused and self.config.train.offload_optimizer
        largest = max(self.embedding, self.layer.intermediate_size * self.spec.hidden_size)
        return replace(
            self.fixed,
            moment="optimizer",
            gradients=0 if in_host_memory else FLOAT32 * self.all // self.shards,
            working=0 if self.fused else 2 * FLOAT32 * largest,
        )

    def _recomputed(self) -> int:
        """What a block's second forward holds, beside what was saved of the first; 0 if there is none."""
        if self.config.train.recompute == "none":
            return 0
        there = self.operator_outputs if self.config.train.recompute == "selective" else 0
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
        each = 3 * FLOAT32 + (self.number if self.number < FLOAT32 else 0)
        return each * min(CHUNK_TOKENS, self.load.tokens) * self.spec.vocab_size // self.split
