"""Another RoPE for a checkpoint: the same logits as transformers with that RoPE in its config."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.config import ConfigError, load

transformers = pytest.importorskip("transformers")

from tests.huggingface_cases import build_model  # noqa: E402
from tests.pretrained_cases import largest_error, reference, step  # noqa: E402
from tests.workers import Workers  # noqa: E402

KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "base": (["rope_theta=50000.0"], {"rope_type": "default", "rope_theta": 50000.0}),
    "linear": (["rope_scaling=linear", "rope_factor=4.0"], {"rope_type": "linear", "factor": 4.0}),
    "ntk": (["rope_scaling=ntk", "rope_factor=4.0"], {"rope_type": "default", "rope_theta": 1e4 * 4.0 ** (8 / 6)}),
    "yarn": (
        ["rope_scaling=yarn", "rope_factor=4.0", "rope_original_length=16"],
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "llama3": (
        ["rope_scaling=llama3", "rope_factor=8.0", "rope_original_length=16"],
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_takes_another_rope(workers: Workers, tmp_path: Path, kind: str) -> None:
    settings, rope = KINDS[kind]
    build_model("llama", "eager").save_pretrained(tmp_path / "plain")
    changed = build_model("llama", "eager", rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=64)
    changed.save_pretrained(tmp_path / "changed")
    loss, gradients, _ = reference(tmp_path / "changed")
    assert abs(reference(tmp_path / "plain")[0] - loss) > 1e-4, "a RoPE that changes nothing proves nothing"
    (found_loss, found_gradients, _), _ = workers.run(step, 2, tmp_path / "plain", [f"model.{each}" for each in settings])
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert largest_error(found_gradients, gradients) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_says_no_more_than_its_rope_has(tmp_path: Path, kind: str) -> None:
    """As in transformers, which would warn of fields of other types, or take one for the trained length."""
    settings, rope = KINDS[kind]
    build_model("llama", "eager").save_pretrained(tmp_path)
    config = (
        load(None, [f"model.from_pretrained={tmp_path}", *(f"model.{each}" for each in settings)]).model_source().files.config
    )
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if kind == "yarn" else {}
    assert config.rope_parameters == {"rope_theta": 1e4, **defaults, **rope}


def test_layers_with_a_window_keep_their_rope(tmp_path: Path) -> None:
    build_model("gemma3_text", "eager").save_pretrained(tmp_path)
    config = load(None, [f"model.from_pretrained={tmp_path}", "model.rope_scaling=linear", "model.rope_factor=8.0"])
    changed, plain = config.model_source().files.config, transformers.AutoConfig.from_pretrained(tmp_path)
    assert changed.rope_parameters["sliding_attention"] == plain.rope_parameters["sliding_attention"]
    assert changed.rope_parameters["full_attention"]["factor"] == 8.0
    assert changed.max_position_embeddings == 8 * plain.max_position_embeddings


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("gpt2", ["rope_theta=1e5"], "gpt2 has no rotary position embedding"),
        ("llama", ["rope_scaling=yarn"], "rope_factor is 1.0: give a factor greater than 1"),
        ("llama", ["rope_factor=4.0"], "rope_scaling is not set"),
        ("llama", ["hidden_size=64"], "sizes are taken from the checkpoint"),
    ],
)
def test_what_a_checkpoint_cannot_take_is_refused(tmp_path: Path, kind: str, settings: list[str], named: str) -> None:
    build_model(kind, "eager").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=named):
        load(None, [f"model.from_pretrained={tmp_path}", *(f"model.{each}" for each in settings)])


def test_a_new_rope_works_on_the_device(tmp_path: Path) -> None:
    """Frequencies are computed from the changed config, after the weights are read."""
    build_model("llama", "eager").save_pretrained(tmp_path)
    config = load(None, [f"model.from_pretrained={tmp_path}", "model.rope_scaling=linear", "model.rope_factor=2.0"])
    with torch.device("meta"):
        model = config.model_source().build()
    assert model.describe()["transformers"]["rope_parameters"]["factor"] == 2.0
