"""Every model for masked tokens of the installed transformers is exact, refused with a reason, or
not buildable when tiny.

docs/encoders.md has the results. To write it again (takes minutes), run

    python -m tests.hf.test_encoder_families
"""

from pathlib import Path

import pytest
import transformers

from longctx.hf.attention import HuggingFaceError, prepare
from tests.encoder_families import FAMILIES, build, classify
from tests.family_cases import MIXING
from tests.hf.test_huggingface_families import OUTCOMES, find_all, outcomes, render
from tests.workers import Workers

TABLE = Path(__file__).resolve().parents[2] / "docs" / "encoders.md"
HEADER = """\
# Encoders of transformers

All {types} model types with a head for masked tokens in transformers {transformers} (torch {torch}): {counts}.

Each was built tiny, with random weights and every kind of layer of its default config, and took a step on six documents of 1 to
90 tokens, a third of them masked, over two gloo processes: three micro-batches, degrees 1 and 2 side by side, one micro-batch
without a token on one process.

- `exact`: loss and gradients are those of one process that takes document after document with the model's own attention, the
  loss to {loss:.0e} and the gradient of each parameter to {gradients:.0e}, relatively, in float64. `mixed` is the change of the
  gradients if documents saw each other.
- `refused`: `prepare(model, causal=False)` raises `HuggingFaceError` with this text.
- `not buildable`: transformers cannot build or run the tiny model; `prepare` checks larger ones as it does any model.

A config may have other layers than its default: `prepare` looks at the model that it is given, not at its name.

Written by `python -m tests.hf.test_encoder_families`, checked by `pytest -m slow tests/hf/test_encoder_families.py`.

| model type | class | outcome | error of loss | of gradients | mixed | note |
|---|---|---|---:|---:|---:|---|
"""


@pytest.mark.slow
def test_every_encoder_is_exact_or_refused(workers: Workers) -> None:
    findings = find_all(workers, FAMILIES, classify)
    assert not {
        kind: finding for kind, finding in findings.items() if finding["kind"] not in OUTCOMES
    }
    assert (
        min(finding["mixing"] for finding in findings.values() if finding["kind"] == "exact")
        > MIXING
    )
    written = TABLE.read_text("utf-8")
    if f"transformers {transformers.__version__} " in written:
        assert outcomes(render(findings, HEADER, FAMILIES)) == outcomes(written), (
            "write it again (see above)"
        )


def test_the_table_lists_every_encoder() -> None:
    written = TABLE.read_text("utf-8")
    rows = outcomes(written)
    assert {outcome for _, outcome, _ in rows.values()} == set(OUTCOMES)
    assert all(text for _, outcome, text in rows.values() if outcome != "exact")
    assert {kind for kind in ("bert", "roberta", "modernbert") if rows[kind][1] == "exact"} == {
        "bert",
        "roberta",
        "modernbert",
    }
    if f"transformers {transformers.__version__} " in written:
        assert {kind: name for kind, (name, _, _) in rows.items()} == FAMILIES


@pytest.mark.parametrize("place", ["absolute", "rotary"])
def test_a_scale_by_the_share_of_masks_in_the_row_is_noticed(place: str) -> None:
    """ESM scales all embeddings by it, if so configured: documents in one row would change each
    other."""
    prepare(build("esm", position_embedding_type=place, token_dropout=False), causal=False)
    with pytest.raises(
        HuggingFaceError, match="mixes tokens outside transformers' attention interface"
    ):
        prepare(build("esm", position_embedding_type=place, token_dropout=True), causal=False)


def main() -> None:
    workers = Workers()
    try:
        TABLE.write_text(render(find_all(workers, FAMILIES, classify), HEADER, FAMILIES), "utf-8")
    finally:
        workers.stop()


if __name__ == "__main__":
    main()
