"""Memory model: peak memory per rank in bytes, by purpose.

Few moments of a step can be the peak: the loss, the backward of the last block, the end of backward
and the optimizer. Each is summed up from the tensors that autograd, FSDP2 and ring attention keep.
A test compares the largest with the allocator's peak on CPUs. Not counted: the process and its
libraries, and fragmentation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from longctx.config import Config
from longctx.memory.block import BlockMemory
from longctx.memory.kernels import FLOAT32, kernel_workspace, outside_allocator
from longctx.memory.loads import Load
from longctx.planning.cost.spec import LayerSpec, Matrix, ModelSpec
from longctx.planning.cost.work import ELEMENT_BYTES, layers_of_ranks
from longctx.training.objectives.loss import tokens_at_once
from longctx.training.optimizer import OPTIMIZERS


@dataclass(frozen=True)
class Memory:
    """Peak memory of a rank in bytes: the parts at one `moment` of a step, and their sum `total`.

    Attributes:
        parameters: shard of the weights, in float32; those frozen by LoRA in the compute dtype, or
            quantized.
        optimizer: shard of the optimizer state.
        gathered_weights: weights gathered from all shards, in the compute dtype, or quantized.
        gradients: whole gradients until they are reduced, then a shard.
        activations: tensors kept from forward for backward.
        remote_kv: K and V received from other ranks, copies sent to them, and gradients of both in
            backward.
        working: temporary tensors of one block in backward, with the workspace of its attention
            kernel and the largest quantized matrix, expanded; or of the optimizer for its largest
            parameter.
        logits: one chunk of the loss.
        pipeline: receive buffers, and activations of further micro-batches in flight.
        device: on GPUs the CUDA context and NCCL's buffers, which are outside of the allocator.
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
    device: int = 0

    @property
    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def to_json(self) -> dict[str, int | str]:
        return {**asdict(self), "total": self.total}


def estimate(
    spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load], *, fused: bool
) -> Memory:
    """Estimates peak memory on the fullest of `ranks` processes under any of the loads; `fused`:
    CUDA's fused operations."""
    return max(
        _moments(spec, config, ranks=ranks, candidates=candidates, fused=fused),
        key=lambda memory: memory.total,
    )


def fits(
    spec: ModelSpec,
    config: Config,
    ranks: int,
    candidates: Sequence[Load],
    available: int,
    *,
    fused: bool,
) -> bool:
    """Returns whether an `estimate` would be at most `available` bytes; stops at the first moment
    that exceeds it."""
    return all(
        memory.total <= available
        for memory in _moments(spec, config, ranks=ranks, candidates=candidates, fused=fused)
    )


def _moments(
    spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load], fused: bool
) -> Iterator[Memory]:
    device = outside_allocator(config, ranks) if fused else 0
    for load in candidates:
        parts = [(rank, False) for rank in range(config.parallel.pipeline_parallel_size)]
        for pipeline_rank, in_encoder in parts + [(0, True)] * bool(spec.encoder_layers):
            for moment in RankMemory(
                spec,
                config,
                ranks=ranks,
                load=load,
                fused=fused,
                pipeline_rank=pipeline_rank,
                in_encoder=in_encoder,
            ).moments():
                yield replace(moment, device=device)


class Weights:
    """Numbers of parameters of a pipeline rank, before they are sharded over the domain.

    Attributes:
        block: one block, with the experts of this rank only.
        root: outside the blocks: the embedding on the first stage, the last norm and the head on
            the last stage.
        all: of the shards of all ranks, with the experts of other ranks.
        trained_block, trained_root, trained_head, trained: those with gradients: all, or only
            adapters. The head is the vocabulary matrix of the last stage, and a part of the root;
            `trained_tower` of an encoder of images.
        updated: parameters with optimizer state on this rank, before sharding.
        matrices: the part of `updated` in matrices of blocks.
        spared: bytes that quantization saves in a block, compared with the compute dtype.
        largest: the largest parameter, or with adapters an upper bound.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Config,
        layer: LayerSpec,
        held: Sequence[LayerSpec],
        first: bool,
        last: bool,
    ) -> None:
        """`layer` is the largest of the blocks `held`, which all count as large."""
        split = config.parallel.tensor_parallel_size
        expert_ranks = config.parallel.expert_parallel_size
        experts = layer.expert_parameters // split
        layers = len(held)
        matrices = layer.matrix_parameters + layer.idle_parameters
        whole = matrices // split + layer.vectors + layer.adapter_parameters
        self.block = whole - experts + experts // expert_ranks
        embedding = spec.vocabulary_parameters // split
        positions = 0
        tower = 0
        frozen_tower = 0
        self.trained_tower = 0
        if first:
            positions = spec.encoder_root_parameters // split
            tower = spec.tower_parameters + spec.tower_adapters
            frozen_tower = spec.frozen_tower
            self.trained_tower = spec.trained_tower
        vocabulary_matrices = first + last - (first and last and spec.tie_word_embeddings)
        self.root = vocabulary_matrices * embedding + positions
        if last:
            self.root += spec.hidden_size
        self.all = layers * whole + self.root + tower
        matrix = max(
            layer.intermediate_size * spec.hidden_size, layer.expert_parameters // 3 // expert_ranks
        )
        if spec.adapted:
            self.trained_block = layer.adapter_parameters
            self.trained_root = 0
            self.trained_head = 0
            self.matrices = layers * layer.adapter_parameters
            self.largest = self.trained_block
        else:
            self.trained_block = self.block
            self.trained_root = self.root
            self.trained_head = embedding if last else 0
            self.matrices = layers * (matrices // split)
            self.largest = max(embedding, positions, matrix)
        self.trained = layers * self.trained_block + self.trained_root + self.trained_tower
        self.updated = self.trained if spec.adapted else self.all - frozen_tower
        self.spared = sum(
            ELEMENT_BYTES[config.dtype] * each.size - (each.stored or 0) for each in layer.quantized
        )


def _mean(layers: Sequence[LayerSpec]) -> LayerSpec:
    """Returns a block with the mean number of parameters of encoder and decoder, which may differ
    much."""
    rows = [(layer.matrix_parameters, layer.adapter_parameters, layer.vectors) for layer in layers]
    matrices, adapters, vectors = (sum(column) // len(rows) for column in zip(*rows, strict=True))
    sizes = Matrix(1, matrices), Matrix(1, adapters, role="adapter")
    return replace(layers[-1], matrices=sizes, vectors=vectors)


class RankMemory:
    """A step of one pipeline rank under one load: the moments that may be its peak.

    Those of an encoder-decoder are in the backward of its decoder, or `in_encoder` of its encoder,
    after that.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Config,
        ranks: int,
        load: Load,
        fused: bool,
        pipeline_rank: int,
        in_encoder: bool = False,
    ) -> None:
        self.spec = spec
        self.config = config
        self.load = load
        self.fused = fused
        self.pipeline_rank = pipeline_rank
        self.recompute = config.train.recompute
        self.tensor_ranks = config.parallel.tensor_parallel_size
        self.first = pipeline_rank == 0
        self.last = pipeline_rank == config.pipeline.ranks - 1
        self.heads = self.last and not in_encoder
        stages = layers_of_ranks(spec, config.pipeline, config.batch.tokens_per_rank)
        held = [spec.layers[number] for number in stages[pipeline_rank]]
        # Number of blocks on this rank; all count as large as the largest one.
        self.layers = len(held)
        parts = [(held, load.tokens)]
        if spec.encoder_layers:  # tokens of a part run through its own blocks
            encoder = held[: spec.encoder_layers]
            decoder = held[spec.encoder_layers :]
            parts = [(encoder, load.source)]
            if not in_encoder:
                parts.append((decoder, load.tokens - load.source))
        self.kept = 0
        self.on_host = 0
        for layers, tokens in parts:
            self.kept += self._count_blocks(layers, tokens)
        self.weights = Weights(
            spec,
            config,
            layer=_mean(held) if spec.encoder_layers else self.layer,
            held=held,
            first=self.first,
            last=self.last,
        )
        self._keep_activations(held)
        self._keep_gradients(ranks)

    def _count_blocks(self, layers: Sequence[LayerSpec], tokens: int) -> int:
        """Sets the block of each kind among `layers`, adds the bytes that they keep in host memory,
        and returns those that all of them keep for backward of `tokens` tokens."""
        largest = max(layers, key=lambda layer: layer.parameters)
        spec = replace(self.spec, hidden_size=largest.hidden_size)
        load = replace(self.load, tokens=tokens)
        kinds = [layer.attention_in(largest) for layer in layers]
        self.layer = largest
        self.blocks = {}
        for layer in dict.fromkeys(kinds):
            self.blocks[layer] = BlockMemory(
                spec, self.config, layer=layer, load=load, fused=self.fused
            )
        self.block = self.blocks[kinds[0]]
        self.on_host += sum(self.blocks[kind].on_host for kind in kinds)
        return sum(self.blocks[kind].kept(self.recompute) for kind in kinds)

    def _keep_activations(self, held: Sequence[LayerSpec]) -> None:
        """Computes what a micro-batch keeps for backward: activations, received K and V, and the
        values of quantized weights."""
        load = self.load
        # RoPE tables are float32, token tensors int64.
        self.tables = load.tokens * (self.layer.head_dim * FLOAT32 + 3 * 8)
        # An encoder of images keeps its tensors until all blocks are done.
        if self.weights.trained_tower:
            self.tower = round(self.block.element_bytes * self.spec.tower_values * load.tokens)
        else:
            self.tower = 0
        self.activations = self.kept + self.tables + self.tower
        # Received K and V kept for backward: in all layers, or while one layer's attention is
        # recomputed.
        kept_kv = self.block.sent_row * load.remote if self.config.context.keep_kv else 0
        if self.recompute == "full":
            self.kept_kv = 0
        else:
            self.kept_kv = sum(layer.attends for layer in held) * kept_kv
        # While one block is recomputed.
        self.kept_in_block = kept_kv if self.recompute == "full" else self.kept_kv
        # The largest quantized matrix: float32 values with indices or with the rounded matrix.
        self.expanded = (FLOAT32 + 2) * max(
            (matrix.size for matrix in self.layer.quantized), default=0
        )

    def _keep_gradients(self, ranks: int) -> None:
        """Computes what outlives a micro-batch: shards of weights and optimizer state, and
        gradients of earlier ones."""
        weights = self.weights
        in_pipeline = self.config.pipeline.ranks > 1
        shards = self.shards = self.config.parallel.shard_ranks or self.config.domain(ranks)
        self.shard = FLOAT32 * weights.updated // shards
        self.fixed = Memory("", pipeline=self.pipeline())
        if not (self.config.train.offload_optimizer and self.fused):
            frozen = self.block.element_bytes if self.spec.adapted else FLOAT32
            parameters = FLOAT32 * weights.updated + frozen * (weights.all - weights.updated)
            parameters -= self.layers * weights.spared
            kind = OPTIMIZERS[self.config.optimizer.name]
            sizes = self.spec.trained_sizes
            optimizer = kind.state_bytes(weights.updated, weights.matrices, sizes)
            self.fixed = replace(
                self.fixed, parameters=parameters // shards, optimizer=optimizer // shards
            )
        # A pipeline adds up gradients, and reduces them after its last backward.
        alone = self.load.micro_batches == 1
        self.reduced_at_once = not in_pipeline and (
            alone or self.config.parallel.reduce_after == "micro_batch"
        )
        # Gradients of earlier micro-batches: whole if they are reduced at the end of the step.
        kept = weights.updated // shards if self.reduced_at_once else weights.trained
        self.unreduced = 0 if alone and not in_pipeline else FLOAT32 * kept
        self.earlier_gradients = 0 if self.load.first and not in_pipeline else self.unreduced

    def gathered(self, blocks: int) -> int:
        """Returns the bytes of gathered weights while `blocks` blocks are in use."""
        held = blocks if self.config.parallel.reshard_after == "block" else self.layers
        return (
            self.block.element_bytes * (self.weights.root + held * self.weights.block)
            - held * self.weights.spared
        )

    def pipeline(self) -> int:
        """Returns the bytes of further micro-batches in flight, and of one buffer per pipeline
        message."""
        pipeline = self.config.pipeline
        if pipeline.ranks == 1:
            return 0
        runs = pipeline.runs(self.load.micro_batches)
        later = pipeline.ranks - 1 - self.pipeline_rank
        chunked = (2 * later + (pipeline.chunks - 1) * pipeline.ranks) / pipeline.chunks
        warm_up = 1 + (later if pipeline.chunks == 1 else chunked)
        in_flight = min(float(runs), warm_up)
        # Hidden states stay until backward; gradients are consumed on arrival.
        messages = (
            in_flight * (pipeline.chunks - int(self.first)) + pipeline.chunks - int(self.last)
        )
        kept = self.kept + self.kept_kv
        return round((in_flight - 1) * kept + messages * self.block.stream)

    def moments(self) -> Iterator[Memory]:
        """Yields the moments of the heaviest micro-batch that may be the peak."""
        for block in self.blocks.values():
            yield from self._block_moments(block)
        if self.heads:
            yield from self._head_moments()
        yield self._end_of_backward()
        in_host_memory = self.fused and self.config.train.offload_optimizer
        # Without fused operations, the optimizer needs two temporaries of the largest parameter's
        # size.
        kind = OPTIMIZERS[self.config.optimizer.name]
        temporaries = 0 if self.fused and kind.fused else 2 * FLOAT32 * self.weights.largest
        working = max(
            temporaries, kind.working_bytes(self.layer, self.weights.matrices // self.shards)
        )
        yield replace(
            self.fixed,
            moment="optimizer",
            gradients=0 if in_host_memory else self.shard,
            working=working,
        )

    def _in_block(self, moment: str, **parts: int) -> Memory:
        """Returns a moment in the backward of a block.

        The gradient of the head already exists; the block's new gradients exist next to the earlier
        ones until they are added, or reduced: then next to those of the block after it, which are
        being reduced in float32.
        """
        fresh = self.block.element_bytes * (self.weights.trained_head + self.weights.trained_block)
        fresh += (
            FLOAT32 * self.weights.trained_block if self.reduced_at_once and self.layers > 1 else 0
        )
        gradients = self.earlier_gradients + fresh
        return replace(
            self.fixed,
            moment=moment,
            gathered_weights=self.gathered(2),
            gradients=gradients,
            **parts,
        )

    def _block_moments(self, block: BlockMemory) -> Iterator[Memory]:
        mlp = block.kept("none", "mlp")
        recomputed = block.recomputed(self.recompute) + self.expanded
        # Gradients of the MLP's output and input for all tokens, with tensor parallelism.
        gathered = 2 * block.normed if self.tensor_ranks > 1 else 0
        sent_forward, sent_backward = self._exchanges()
        activations = self.activations + block.on_host
        yield self._in_block(
            "backward of the last MLP",
            activations=activations,
            working=recomputed + block.tile + block.mlp_gradients + gathered,
            remote_kv=self.kept_in_block,
        )
        yield self._in_block(  # after the MLP's backward, when its activations are freed
            "backward of the last attention",
            activations=activations - (mlp if self.recompute == "none" else 0),
            working=max(0, recomputed - mlp) + self._attention_backward(block) + 2 * block.stream,
            remote_kv=self.kept_in_block + sent_backward,
        )
        if self.recompute == "full":
            yield self._in_block(
                "recomputed attention in backward",
                activations=activations,
                working=block.kept("none", "attention")
                + block.queries * FLOAT32 // block.element_bytes,
                remote_kv=self.kept_in_block + sent_forward,
            )

    def _head_moments(self) -> Iterator[Memory]:
        stream = self.block.stream
        norm = self.block.norm
        yield self._in_block(
            "backward of the last norm",
            activations=self.activations + norm,
            working=stream
            + (0 if self.block.whole_norms else 3 * stream * FLOAT32 // self.block.element_bytes),
            remote_kv=self.kept_kv,
        )
        yield replace(
            self.fixed,
            moment="loss",
            gathered_weights=self.gathered(1),
            gradients=self.earlier_gradients + FLOAT32 * self.weights.trained_head,
            activations=self.activations
            + stream * int(self.tensor_ranks > 1)
            + 2 * self.block.normed
            + norm,
            remote_kv=self.kept_kv,
            logits=self._logits(),
        )

    def _end_of_backward(self) -> Memory:
        """Returns the moment after all blocks, when the gradients outside of them are added or
        reduced, but not yet freed.

        Weights are not gathered then. If gradients are reduced once per step, those of the blocks
        are reduced before this moment of the last micro-batch.
        """
        root = FLOAT32 * self.weights.trained_root
        fresh = self.block.element_bytes * self.weights.trained_root
        copies = 0 if self.fused else 2 * root  # gloo's
        reduced = (fresh if self.reduced_at_once else root) + root + copies
        if self.reduced_at_once:
            held = self.unreduced + reduced
        else:
            held = max(self.unreduced + fresh, reduced)
        kept = self.config.parallel.reshard_after == "step" and self.load.micro_batches > 1
        return replace(
            self.fixed,
            moment="end of backward",
            gathered_weights=self.gathered(0) if kept else 0,
            gradients=held,
            activations=self.tables + self.block.normed + self.tower,
        )

    def _attention_backward(self, block: BlockMemory) -> int:
        """Returns the largest of three moments: gradients of out, q, k and v with their float32
        sums, the Ulysses swap, or the backward of linear attention.
        """
        load = self.load
        queries = block.queries
        keys = block.keys
        linear = 0 if block.layer.scan is None else load.tokens * block.layer.scan.working
        if not block.layer.attends:
            return linear
        sums = (queries + keys) * FLOAT32 // self.block.element_bytes if load.remote else 0
        sums += (
            kernel_workspace(self.config, self.layer, load.tokens, max(load.tokens, load.fullest))
            if self.fused
            else 0
        )
        # Gradients of swapped q, k and v on the way back: computed, sorted, received, concatenated
        # and in place.
        swap = round(5 * self.block.swapped_share * (queries + self.block.swapped_keys))
        return max(2 * queries + keys + sums, swap, linear)

    def _exchanges(self) -> tuple[int, int]:
        """Returns the maximum bytes of K and V in messages in a forward pass, and with gradients in
        a backward pass."""
        if not self.load.remote:
            return 0, 0
        at_once = self.load.held / self.load.remote
        row = self.block.sent_row
        latent = self.layer.latent
        received = row * self.load.remote
        sent = row * self.load.sent
        own = row * self.load.tokens
        fetched = 0 if self.config.context.keep_kv else received
        # Backward also has gradients of the rows in flight, and a kernel's input and output for one
        # round. Latents of a round are expanded by a product and a copy; backward has gradients of
        # both, and of the weights.
        under_way = (fetched + received + sent) * at_once
        computed = 2 * self.block.kv_row * self.load.fullest
        expanded = 1.25 * computed if latent.values else 0
        forward = (fetched + sent) * at_once + expanded
        backward = under_way + computed + expanded + FLOAT32 * latent.parameters
        return round(forward) + own, round(backward) + own

    def _logits(self) -> int:
        """Returns the largest of three moments, without the head's gradient in float32: one chunk;
        the last chunk while the head's gradient is rounded; backward, when two rounded copies
        exist.
        """
        assert self.spec.vocab_size is not None
        compiled = self.config.compiles("cuda" if self.fused else "cpu", self.spec)
        rounded = self.block.element_bytes < FLOAT32
        numbers = (
            min(tokens_at_once(compiled), self.block.tokens)
            * self.spec.vocab_size
            // self.tensor_ranks
        )
        with_gradient = 2 * self.block.element_bytes * numbers
        if compiled:
            chunk = with_gradient
        else:
            chunk = 3 * FLOAT32 * numbers + (with_gradient if rounded else 0)
        head = self.block.element_bytes * self.weights.trained_head
        return max(
            chunk,
            with_gradient + (head if rounded else 0),
            2 * head - FLOAT32 * self.weights.trained_head,
        )
