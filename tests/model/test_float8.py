"""Linear layers in float8, emulated on the CPU: losses stay close to those of bfloat16; what is not
supported is refused."""

import importlib.util
from pathlib import Path

import pytest
import torch

from longctx.config import ConfigError, load
from longctx.errors import UserError
from longctx.model.decoder import Decoder
from longctx.model.presets import PRESETS
from longctx.parallel.float8 import check_float8, convert_to_float8
from tests.training_cases import train
from tests.workers import Workers

BFLOAT16 = ["train.dtype=bfloat16", "batch.tokens_per_rank=1504"]


@pytest.fixture(scope="module")
def plain(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return [
        metrics.loss
        for metrics in workers.run(train, 1, store, tmp_path_factory.mktemp("plain"), BFLOAT16, 5)[
            0
        ]
    ]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(1, ["train.float8=tensorwise"], marks=pytest.mark.slow),
        pytest.param(1, ["train.float8=rowwise", "train.recompute=norms"], marks=pytest.mark.slow),
        pytest.param(
            3, ["train.float8=rowwise", "batch.tokens_per_rank=512"], marks=pytest.mark.slow
        ),
        pytest.param(
            2,
            [
                "train.float8=tensorwise",
                "parallel.pipeline_parallel_size=2",
                "model.overrides.num_hidden_layers=2",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_loss_curve_stays_within_1_percent_of_bfloat16(
    workers: Workers,
    store: Path,
    plain: list[float],
    tmp_path: Path,
    ranks: int,
    settings: list[str],
) -> None:
    losses = [
        metrics.loss
        for metrics in workers.run(train, ranks, store, tmp_path, [*BFLOAT16, *settings], 5)[0]
    ]
    assert losses == pytest.approx(plain, rel=0.01)
    assert losses != pytest.approx(plain, rel=1e-6), "float8 must have been used"


def test_only_aligned_layers_of_blocks_are_converted_and_empty_inputs_work() -> None:
    torch.manual_seed(0)
    model = Decoder(PRESETS["tiny"].model_copy(update={"vocab_size": 50, "intermediate_size": 200}))
    weights = dict(model.named_parameters())
    convert_to_float8(model, "rowwise", torch.device("cpu"), 16)
    kinds = {
        name: type(layer).__name__
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    float8 = {name.split(".")[-1] for name, kind in kinds.items() if kind == "Float8Linear"}
    assert float8 == {"q_proj", "k_proj", "v_proj", "o_proj"}, (
        "200 columns are no multiple of 16, and the head stays"
    )
    assert dict(model.named_parameters()).keys() == weights.keys()
    assert all(weight is weights[name] for name, weight in model.named_parameters())
    layer = model.layers[0].self_attn.q_proj
    x = torch.randn(32, layer.in_features)
    assert layer(x[:0]).shape == (0, layer.out_features)
    exact = torch.nn.functional.linear(x, layer.weight)
    assert torch.equal(layer(x[:5]), torch.nn.functional.linear(x[:5], layer.weight)), (
        "no multiple of 16 tokens"
    )
    assert not torch.equal(layer(x), exact)
    torch.testing.assert_close(layer(x), exact, rtol=0.1, atol=0.1)


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"NVIDIA A100 has compute capability 8\.0, .* need 8\.9"):
        check_float8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(torch.device("cuda"))
    check_float8(torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["train.dtype=bfloat16", "batch.tokens_per_rank=1000"], "multiple of 16 tokens"),
        (["train.dtype=bfloat16", "train.mlp_tile_tokens=100"], "multiple of 16 tokens"),
    ],
)
def test_what_is_not_supported_is_refused(settings: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load(None, ["train.float8=tensorwise", *settings])


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else found(name)
    )
    with pytest.raises(ConfigError, match=r"pip install '\.\[gpu\]'"):
        load(None, ["train.float8=tensorwise", "train.dtype=bfloat16"])


def test_models_of_transformers_are_refused(workers: Workers, store: Path, tmp_path: Path) -> None:
    from tests.lora_cases import make_checkpoint, settings_of

    checkpoint = make_checkpoint(tmp_path, "llama")
    settings = [
        *settings_of(checkpoint, *BFLOAT16, "train.float8=rowwise"),
        "lora.rank=null",
        "lora.alpha=null",
        "model.implementation=transformers",
    ]
    with pytest.raises(
        AssertionError,
        match=r"train\.float8 is rowwise, but transformers' own code runs this model",
    ):
        workers.run(train, 1, store, tmp_path / "run", settings, 1)
