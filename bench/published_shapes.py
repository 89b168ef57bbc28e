"""Does a rate by the shape of matrices explain published runs of sources that it was not set by?

    python -m bench.published_shapes h100=FILE h200=FILE a100=FILE    # a minute; writes others.md

The files are measured products in bfloat16 of NVIDIA's aiconfigurator at 095f58a, in
aic-core/src/aiconfigurator_core/systems/data/{h100_sxm,h200_sxm,a100_sxm}/gemm/sglang/ (0.5.14,
0.5.14, 0.5.10): seconds by rows, outputs and inputs. Each of the three products of a matrix,
forward and backward, gets the share of the peak that was measured for its shape, between measured
shapes by logarithms; constants are then fitted anew, without each source. Rows of experts are taken
together.
"""

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from bench.harness import markdown
from bench.published import PAGE
from bench.published_fit import SHEETS, Fit, fitted, mean_error, median, of_kind, unseen_errors
from bench.published_runs import CAUSES, Case, cases
from bench.recipes import replaced
from longctx.planning.cost.spec import LayerSpec, Matrix
from longctx.planning.cost.work import layers_of_ranks

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SIDES = (64, 128, 256, 512, 1024, 2048, 2560, 3072, 4096, 5120, 7168, 8192, 10240, 12288, 16384)
"""Sizes between which shares are interpolated: all measured together."""
GPUS = {"h100": "h100-nvlink-ib", "h200": "h200-nvlink-ib", "a100": "a100-80gb"}
SOURCE = "By NVIDIA's tables of measured products (aiconfigurator at 095f58a)"
REFERENCE = ("llama-3.1-8b", 8192)
"""Model and tokens per rank whose products have the fitted share; profiles are for this model."""


class Shares:
    """Shares of the peak that products of a GPU reached, by rows, outputs and inputs."""

    def __init__(self, path: Path, gpu: str) -> None:
        columns = ["gemm_dtype", "m", "n", "k", "latency"]
        table = parquet.read_table(path, columns=columns).to_pylist()
        measured_s = {
            (row["m"], row["n"], row["k"]): 1e-3 * row["latency"]
            for row in table
            if row["gemm_dtype"] == "bfloat16"
        }
        peak = SHEETS[gpu].flops
        self.axes = [np.log(sizes) for sizes in (ROWS, SIDES, SIDES)]
        self.shares = np.empty((len(ROWS), len(SIDES), len(SIDES)))
        for place in np.ndindex(self.shares.shape):
            rows, outputs, inputs = ROWS[place[0]], SIDES[place[1]], SIDES[place[2]]
            operations = 2 * rows * outputs * inputs
            self.shares[place] = operations / measured_s[rows, outputs, inputs] / peak

    def of(self, *sizes: float) -> float:
        """Returns the share of a product of `rows`, `outputs`, `inputs`."""
        corners = []
        for size, axis in zip(sizes, self.axes, strict=True):
            value = float(np.clip(np.log(size), axis[0], axis[-1]))
            low = int(np.clip(np.searchsorted(axis, value) - 1, 0, len(axis) - 2))
            part = (value - axis[low]) / (axis[low + 1] - axis[low])
            corners.append(((low, 1 - part), (low + 1, part)))
        found = 0.0
        for chosen in itertools.product(*corners):
            place = tuple(number for number, _ in chosen)
            found += self.shares[place] * np.prod([weight for _, weight in chosen])
        return float(found)


def slower(case: Case, shares: Shares) -> float:
    """Returns the time of the products of a rank at the measured shares, over that at the peak."""
    run, spec = case.run, case.spec
    held = layers_of_ranks(spec, case.config.pipeline, run.tokens_per_rank)[-1]
    head = Matrix(spec.vocab_size or 0, spec.hidden_size)
    own = [
        (matrix, layer)
        for layer in map(spec.layers.__getitem__, held)
        for matrix in layer.model_matrices
    ]
    own.append((head, spec.layers[0]))
    at_shares = at_peak = 0.0
    for matrix, layer in own:
        outputs, inputs = _on_rank(matrix, layer, run.tp)
        rows = run.tokens_per_rank * matrix.used
        forwards = 1 + (run.recompute == "full" and matrix is not head)
        operations = matrix.used * outputs * inputs
        times = forwards / shares.of(rows, outputs, inputs) + 1 / shares.of(rows, inputs, outputs)
        if not spec.adapted:
            times += 1 / shares.of(outputs, inputs, rows)
        at_shares += operations * times
        at_peak += operations * (forwards + 2 - spec.adapted)
    return at_shares / at_peak


def _on_rank(matrix: Matrix, layer: LayerSpec, tensor: int) -> tuple[int, int]:
    """Returns the outputs and inputs of a matrix on one of `tensor` tensor-parallel ranks."""
    if matrix.columns == layer.hidden_size:
        return max(1, matrix.rows // tensor), matrix.columns
    return matrix.rows, max(1, matrix.columns // tensor)


def by_shape(given: Sequence[Case], tables: dict[str, Shares]) -> tuple[list[Case], list[float]]:
    """Returns the runs with products at the measured shares, and how much longer they take than
    those of `REFERENCE`."""
    known = {}
    for name, shares in tables.items():
        model, tokens = REFERENCE
        case = next(
            case
            for case in given
            if (case.run.model, case.run.at_once * case.run.length) == (model, tokens)
            and case.run.cp == 1
            and "lora" not in case.run.other
        )
        known[name] = slower(replace(case, run=replace(case.run, recompute="none")), shares)
    remade, factors = [], []
    for case in given:
        gpu = case.run.gpu
        name = "a100" if gpu.startswith("a100") else "h100" if gpu.startswith("h100") else "h200"
        factor = slower(case, tables[name]) / known[name]
        factors.append(factor)
        work = replace(case.work, computed=factor * case.work.computed)
        remade.append(replace(case, work=work))
    return remade, factors


def row(label: str, given: Sequence[Case], causes: tuple[str, ...]) -> list[str]:
    """Returns a row of the page: errors of unseen sources."""
    fit: Fit = fitted(given, causes)
    cells = []
    for float8 in (False, True):
        kinds = (of_kind(rows, float8=float8) for rows in unseen_errors(fit).values())
        medians = [median(off) for off in kinds if off]
        cells.append(f"{statistics.median(medians):.1%}")
    return [label, f"{mean_error(fit, fit.without(None)):.1%}", *cells]


def main() -> None:
    named = dict(argument.split("=", 1) for argument in sys.argv[1:])
    tables = {name: Shares(Path(named[name]), gpu) for name, gpu in GPUS.items()}
    given = cases()
    remade, factors = by_shape(given, tables)
    without = tuple(cause for cause in CAUSES if cause != "products")
    lines = [
        row("all alike", given, without),
        row("alike, and operands moved (the model)", given, CAUSES),
        row("by measured shapes", remade, without),
        row("by measured shapes, and operands moved", remade, CAUSES),
    ]
    head = ("rate of products", "mean error", "median of sources, bfloat16", "float8")
    between = f"{min(factors):.2f} to {max(factors):.2f}"
    said = f"{SOURCE}, a product takes {between} of the time per operation of an 8B's.\n"
    table = "\n".join([*markdown(head, lines), "", said])
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), "shapes", table), "utf-8")
    print(table)


if __name__ == "__main__":
    main()
