"""Traffic: the bytes of device memory that a rank reads and writes per token, beside attention.

A product of t tokens by a matrix of n inputs and m outputs takes 2·t·n·m operations at the rate of
the device's matrix units, and moves its operands, t·(n + m) values, at the rate of its memory. So
the share of the peak that it reaches depends on its shape: n·m / (n + m) operations per value. All
other work of a block is elementwise and only moves values.

Weights themselves are not counted: they are read once per micro-batch, not once per token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from longctx.planning.cost.spec import LayerSpec, Matrix, ModelSpec

BACKWARD = 2
"""Passes over operands, and over elementwise values, in backward; one in forward."""
HEAD = 7
"""Passes over the logits in the loss: they are written, read for their maximum and their sum, read
and overwritten by their gradient, which two products read."""
ADAPTERS = (6, 4), (1, 5)
"""Passes over a matrix's outputs, and over its inputs, that LoRA adds, in forward and in backward.

Outputs: the second product writes them, scaling reads and writes them, and adding reads both and
writes the sum; their gradient is read, scaled (read and written), and read by a product. Inputs:
the first product reads them; the product for their gradient writes it, adding it reads two and
writes one, and the gradient of the first matrix reads them."""
CASTS = (4, 6, 5)
"""Bytes per value that products in float8 move more than those in 16 bits, for inputs in forward
and in backward, and for the gradients of outputs, as torchao counts: a value is read for the
largest, read again and written in a byte; in backward also copied to the other layout; products
then read one byte less."""


class _Passes(NamedTuple):
    """How many values elementwise work reads and writes forward: for a value of the residual
    stream, of queries and keys, and of the MLP."""

    stream: float
    rotation: float
    activation: float


FUSED = _Passes(stream=8, rotation=2, activation=3)
"""In compiled blocks, twice: an addition and a norm read the stream and a branch, and write the sum
and its norm. RoPE reads and writes a value; a gated activation reads two and writes one."""
EAGER = _Passes(stream=10, rotation=9, activation=5)
"""One operation at a time: a norm reads what an addition wrote; RoPE multiplies by cosines, turns
halves, multiplies by sines and adds; the activation is written and read again."""
ROUTING = 4
"""Rows are read and written on the way to experts, and on the way back."""


class Traffic(NamedTuple):
    """Bytes per token, forward and backward.

    Attributes:
        products: operands of matrix products, and their casts to float8.
        elementwise: norms, RoPE, activations, residual additions, and rows on the way to experts.
        head: the logits of the loss.
        adapters: what LoRA's products read and write beside.
    """

    products: float = 0.0
    elementwise: float = 0.0
    head: float = 0.0
    adapters: float = 0.0

    def over(self, share: float) -> "Traffic":
        """Returns a part of the traffic: all of it divided by `share`."""
        return Traffic(
            products=self.products / share,
            elementwise=self.elementwise / share,
            head=self.head / share,
            adapters=self.adapters / share,
        )


NO_TRAFFIC = Traffic()


def traffic_of(
    spec: ModelSpec,
    layers: Sequence[LayerSpec],
    *,
    has_head: bool,
    element_bytes: int,
    recompute: str,
    tensor: int,
    compiled: bool,
    float8: bool,
) -> Traffic:
    """Returns the traffic of blocks and, with `has_head`, of the loss, on one of `tensor`
    tensor-parallel ranks.

    `element_bytes`: bytes of a value; the others are those of `work_of`.
    """
    products = elementwise = 0.0
    for layer in layers:
        products += _operands(layer, tensor) * _passes(layer, recompute, frozen=spec.adapted)
        forwards = 1 + (recompute != "none")
        elementwise += _elementwise(layer, compiled=compiled) * (forwards + BACKWARD) / tensor
    adapters = adapter_values(layers, ADAPTERS, repeated=recompute == "full") / tensor
    logits = 0.0
    if has_head:
        logits = HEAD * (spec.vocab_size or 0) / tensor
    values = Traffic(products, elementwise, logits, adapters)
    traffic = values.over(1 / element_bytes)
    if float8:
        casts = float8_casts(layers, recompute, tensor=tensor)
        traffic = traffic._replace(products=traffic.products + casts)
    return traffic


def _operands(layer: LayerSpec, tensor: int) -> float:
    """Returns the values that the inputs and outputs of all products of a token have.

    Tensor parallelism splits one side of each matrix, not the one of the residual stream.
    """
    return sum(matrix.used * _sides(layer, matrix, tensor) for matrix in layer.model_matrices)


def _sides(layer: LayerSpec, matrix: Matrix, tensor: int) -> float:
    both = matrix.rows + matrix.columns
    on_stream = layer.hidden_size in (matrix.rows, matrix.columns)
    whole = layer.hidden_size * on_stream
    return whole + (both - whole) / tensor


def _passes(layer: LayerSpec, recompute: str, *, frozen: bool) -> float:
    """Returns how often the operands of a block's products are moved: once forward, again where
    backward recomputes them, for the gradient of the input, and for that of the weights."""
    last = layer.hidden_size * layer.intermediate_size
    everything = layer.matrix_parameters
    repeated = {"none": 0, "norms": 0, "mlp": 2 * last}.get(recompute, everything - last)
    return 1 + BACKWARD - frozen + repeated / max(1, everything)


def _elementwise(layer: LayerSpec, *, compiled: bool) -> float:
    """Returns the values that a block's elementwise work reads and writes forward."""
    passes = FUSED if compiled else EAGER
    heads = layer.num_attention_heads + layer.num_key_value_heads
    rotated = heads * layer.head_dim * layer.attends
    return (
        passes.stream * layer.hidden_size
        + passes.rotation * rotated
        + passes.activation * layer.intermediate_size
        + ROUTING * layer.expert_rows * layer.hidden_size
    )


def adapter_values(
    layers: Sequence[LayerSpec],
    passes: tuple[tuple[int, int], tuple[int, int]],
    *,
    repeated: bool,
) -> float:
    """Returns the values that LoRA's products read and write, forward and backward; `passes` are as
    `ADAPTERS`, and `repeated` says whether backward recomputes them."""
    of_outputs, of_inputs = passes
    forwards = 1 + repeated
    outputs = of_outputs[0] * forwards + of_outputs[1]
    inputs = of_inputs[0] * forwards + of_inputs[1]
    values = 0.0
    for layer in layers:
        values += outputs * sum(matrix.used * matrix.rows for matrix in layer.of("adapter"))
        values += inputs * sum(matrix.used * matrix.columns for matrix in layer.of("lora_a"))
    return values


def float8_casts(layers: Sequence[LayerSpec], recompute: str, *, tensor: int) -> float:
    """Returns the bytes per token that products in float8 move more than those in 16 bits, on one
    of `tensor` tensor-parallel ranks."""
    forward, backward, gradients = CASTS
    moved = 0.0
    for layer in layers:
        forwards = _passes(layer, recompute, frozen=True) - 1
        inputs = sum(matrix.used * matrix.columns for matrix in layer.model_matrices)
        outputs = sum(matrix.used * matrix.rows for matrix in layer.model_matrices)
        moved += (forward * forwards + backward) * inputs + gradients * outputs
    return moved / tensor
