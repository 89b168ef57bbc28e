"""Peak memory of published runs (bench/published_runs.py), as their stacks' code holds it.

The word `composed` of a run says that transformers' own blocks run one operation at a time, which
the memory model traces. prime-rl and ms-swift do so. prime-rl asks for `torch.compile`, but nothing
is compiled: a block's attention branches on a value of `position_ids`
(modeling_flash_attention_utils.py of transformers 4.56.1), its adapters assert one
(models/layers/lora/multi_linear.py at d8f290e), and a checkpointed block that cannot be traced
whole runs as it is. Of experts without adapters that is a guess: whether FlashAttention 3 could be
traced.
"""

from dataclasses import replace

from bench.published_runs import Run, settings
from longctx.config import Config
from longctx.memory.loads import full_loads
from longctx.memory.model import Memory, _moments
from longctx.planning.cost.spec import Matrix, ModelSpec

BF16, FLOAT32 = 2, 4
WHOLE_LOGITS = 12
"""Bytes per logit of a loss on all logits at once: two before the cast, four after it, four of
their gradients, and two of those of what was cast."""
MLP, ATTENTION = "backward of the last MLP", "backward of the last attention"
"""Moments in the backward of a block."""
TILE = 16_384
"""Tokens of a tile of TRL's MLP."""
BUCKET = 500_000_000
"""Gradients in a bucket of DeepSpeed: `reduce_bucket_size` of deepspeed/runtime/zero/config.py at
1b88ac3, `__ipg_bucket_flat_buffer` of stage3.py."""
VOCABULARY_CHUNK, CHUNK_BYTES = 2048, 22
"""Entries of the vocabulary of which prime-rl's head computes logits at once, and the bytes per
logit there in backward: 2 before the cast, 4 each for logits, what they differ from the log-sum-exp
by, probabilities, and probabilities and gradients of the chunk before (models/layers/lm_head.py at
d8f290e, run on tensors without values)."""


def peak_bytes(run: Run) -> int:
    """Predicts the peak of the allocator on the fullest GPU, without what it reserves beside."""
    config, vocabulary = settings(run)
    spec = replace(config.model_source(vocabulary).spec, vocab_size=vocabulary)
    if "whole_weights" in run.other:
        return _megatron_bytes(run, spec)
    always = _always_bytes(run, config, spec)
    loads = list(full_loads(config, run.gpus))
    found = []
    for moment in _moments(spec, config, run.gpus, loads, True):
        found.append(moment.total - moment.device + always + _more_bytes(run, spec, moment))
    return max(found)


def _always_bytes(run: Run, config: Config, spec: ModelSpec) -> int:
    """Returns what a stack holds beside ours at every moment.

    `float32_frozen`: frozen weights have four bytes instead of two. `zero3`: DeepSpeed's stage 3
    with its optimizer on the CPU has shards of weights in two bytes, and its bucket of gradients.
    """
    more = 0
    if "float32_frozen" in run.other:
        shards = config.parallel.shard_ranks or config.domain(run.gpus)
        more += 2 * (spec.parameters - spec.trained_parameters) // shards
    if "adapters" in run.other:
        more += _adapter_bytes(run, spec)
    if "zero3" in run.other:
        more += BF16 * (spec.parameters // run.gpus + BUCKET)
    return more


def _more_bytes(run: Run, spec: ModelSpec, moment: Memory) -> int:
    """Returns what a stack holds beside ours at one moment, or less.

    `whole_logits`: the loss keeps all logits and their gradients in place of a chunk, with
    `WHOLE_LOGITS` bytes or as many as are given. `bf16_states`: weights, gradients and moments have
    two bytes instead of four. `host_states`: weights and optimizer are in host memory.
    `gathered_kv`: attention holds K and V of all ranks, and gradients of one rank's at a time, as
    PyTorch's ring does by default. `every_second`: torchtitan's selective recomputation. `sdpa`: a
    block copies the output of attention, as transformers does for PyTorch's.
    """
    more = 0
    if moment.moment == "loss":
        logits = _logits_bytes(run, spec)
        if logits is not None:
            more += logits - moment.logits
    if "bf16_states" in run.other and "lora" not in run.other:
        more -= (moment.parameters + moment.optimizer + moment.gradients) // 2
    if "host_states" in run.other:
        more -= moment.parameters + moment.optimizer
    if "gathered_kv" in run.other and moment.remote_kv:
        more += _gathered_kv_bytes(run, spec)
    if "every_second" in run.other and moment.activations:
        more += _kept_products_bytes(run, spec)
    if "sdpa" in run.other and moment.moment in (MLP, ATTENTION):
        layer = spec.largest_layer
        more += BF16 * run.tokens_per_rank * layer.num_attention_heads * layer.head_dim
    if moment.moment == MLP:
        more += _mlp_bytes(run, spec)
    return more


def _logits_bytes(run: Run, spec: ModelSpec) -> int | None:
    """Returns the bytes of logits in the loss of a stack; None: of a chunk like ours."""
    assert spec.vocab_size is not None
    if "whole_logits" in run.other:
        per_logit = float(run.other["whole_logits"] or WHOLE_LOGITS)
        return round(per_logit * run.tokens_per_rank * spec.vocab_size / run.tp)
    if "log_probabilities" in run.other:
        return _vocabulary_chunk_bytes(run, spec)
    return None


def _vocabulary_chunk_bytes(run: Run, spec: ModelSpec) -> int:
    """Returns the bytes of prime-rl's head: a chunk of the vocabulary for all tokens, and gradients
    of a head that is frozen too."""
    chunk = CHUNK_BYTES * VOCABULARY_CHUNK * run.tokens_per_rank
    return chunk + (BF16 * spec.vocabulary_parameters if spec.adapted else 0)


def _mlp_bytes(run: Run, spec: ModelSpec) -> int:
    """Returns what a stack's MLP holds beside ours at the peak of its backward.

    Liger's (ops/swiglu.py at 2de9364) keeps three tensors of the MLP's width, and writes gradients
    over two: four at once instead of six. prime-rl's experts are fullest when rows are weighed:
    four tensors of rows in float32 (the rows, their gradient before and after, and what sums up to
    the gradients of weights), the rows into experts, and four of the experts' width
    (models/layers/moe.py and lora/multi_moe.py at d8f290e, run on tensors without values).
    `tiles`: TRL's MLP is cut, and has gradients of one tile, but what it cut is kept.
    """
    layer = spec.largest_layer
    tokens = run.tokens_per_rank
    if "liger" in run.other:
        return -2 * BF16 * layer.intermediate_size * tokens
    if "tiles" in run.other:
        return -2 * BF16 * layer.intermediate_size * (tokens - TILE)
    if run.other.get("rows") == "titan":
        assert spec.own is not None
        ours = spec.own.bytes_per_token("bfloat16", frozen=spec.adapted)
        assert ours is not None
        in_mlp = ours.mlp + ours.gradients
        rows = _expert_matrix(spec).used * spec.hidden_size
        theirs = (4 * FLOAT32 + BF16) * rows + 4 * BF16 * layer.intermediate_size
        return round(tokens * (theirs - in_mlp))
    return 0


def _expert_matrix(spec: ModelSpec) -> Matrix:
    """Returns the last matrices of a layer's experts: width of an expert → residual stream."""
    return next(each for each in reversed(spec.largest_layer.matrices) if each.count > 1)


def _adapter_bytes(run: Run, spec: ModelSpec) -> int:
    """Returns what prime-rl's adapters take beside one of ours: `adapters` of each matrix, those of
    experts too, all gathered with a block.

    Its benchmark starts no run that trains them, so there is no optimizer, and gradients stay. A
    matrix has gradients of all its adapters, experts of one (trainer/runs.py, optim.py,
    models/layers/lora/ at d8f290e).
    """
    count = int(run.other["adapters"])
    layers = len(spec.layers)
    shards = run.gpus
    ours = spec.trained_parameters
    experts = 0
    if "expert_adapters" in run.other:
        last = _expert_matrix(spec)
        experts = 3 * int(run.other["lora"]) * (last.rows + last.columns) * last.count * layers
    weights = count * (ours + experts) - ours
    gradients = (count - 1) * ours + experts
    kept = FLOAT32 * (weights + gradients) - 2 * FLOAT32 * ours
    gathered = 2 * BF16 * weights + (BF16 + FLOAT32) * gradients
    return kept // shards + gathered // layers


def _megatron_bytes(run: Run, spec: ModelSpec) -> int:
    """Returns the peak of a rank as Megatron-LM holds its tensors, with sequence parallelism and
    the distributed optimizer (ms-swift's default, its bf16 implies gradients in float32).

    Weights in two bytes and gradients in four are whole, the optimizer's twelve are sharded over
    replicas. A block keeps its tensors as transformer_engine does: inputs and outputs of norms of a
    share of the tokens; what becomes Q, K and V, and Q and K with positions; attention's output;
    the MLP's first outputs and their product. "selective" recomputes attention alone, "full" keeps
    a block's input. Logits are whole: two bytes, and four in float32, which become the
    probabilities and gradients (core/tensor_parallel/cross_entropy.py).
    """
    layer = spec.largest_layer
    ranks = run.tp * run.pp
    parameters = spec.parameters // ranks
    states = (BF16 + FLOAT32) * parameters + 3 * FLOAT32 * parameters // (run.gpus // ranks)
    queries = layer.num_attention_heads * layer.head_dim
    keys = layer.num_key_value_heads * layer.head_dim
    hidden = spec.hidden_size
    block = 4 * hidden + 3 * queries + 3 * keys + 3 * layer.intermediate_size
    per_token = BF16 * run.tokens_per_rank // run.tp
    kept = len(spec.layers) * per_token * (hidden if run.recompute == "full" else block)
    assert spec.vocab_size is not None
    logits = (BF16 + FLOAT32) * run.tokens_per_rank * spec.vocab_size // run.tp
    # Gradients of a block: of the product, of the first outputs, and of the gathered input.
    gradients = per_token * (3 * layer.intermediate_size + 2 * run.tp * hidden)
    recomputed = per_token * block if run.recompute == "full" else 0
    return states + kept + max(logits, recomputed + gradients)


def _kept_products_bytes(run: Run, spec: ModelSpec) -> int:
    """Returns the bytes that torchtitan's selective recomputation keeps beside those of `mlp`: of
    every block the output of the MLP's first matrix, but not K. Compiled blocks do not keep what
    their backward does not need: the MLP's output."""
    values = 0
    for layer in spec.layers:
        values += layer.intermediate_size - layer.num_key_value_heads * layer.head_dim
        if "composed" not in run.other:
            values -= layer.hidden_size
    return 2 * values * run.tokens_per_rank // run.tp


def _gathered_kv_bytes(run: Run, spec: ModelSpec) -> int:
    """Returns the bytes of K and V of the ranks that a ring in rounds would not hold: it holds its
    own and two more."""
    layer = spec.largest_layer
    row = 2 * 2 * layer.num_key_value_heads * layer.head_dim
    return max(0, run.cp - 3) * row * run.tokens_per_rank
