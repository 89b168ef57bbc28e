"""Another RoPE for a checkpoint: the same logits as transformers with that RoPE in its config."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from longctx.config import ConfigError, load
from longctx.model.context_extension import _rotated_dim
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.pretrained_cases import largest_error, reference, step
from tests.workers import Workers

KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "base": (["rope_theta=50000.0"], {"rope_type": "default", "rope_theta": 50000.0}),
    "linear": (
        ["rope_scaling.rope_type=linear", "rope_scaling.factor=4.0"],
        {"rope_type": "linear", "factor": 4.0},
    ),
    "ntk": (
        ["rope_scaling.rope_type=ntk", "rope_scaling.factor=4.0"],
        {"rope_type": "default", "rope_theta": 1e4 * 4.0 ** (8 / 6)},
    ),
    "yarn": (
        [
            "rope_scaling.rope_type=yarn",
            "rope_scaling.factor=4.0",
            "rope_scaling.original_max_position_embeddings=16",
        ],
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "llama3": (
        [
            "rope_scaling.rope_type=llama3",
            "rope_scaling.factor=8.0",
            "rope_scaling.original_max_position_embeddings=16",
        ],
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind in ("ntk", "yarn"), KINDS))
def test_a_checkpoint_takes_another_rope(workers: Workers, tmp_path: Path, kind: str) -> None:
    """Its config has no fields of other types, of which transformers would warn, or take one for
    the trained length."""
    settings, rope = ([f"model.{each}" for each in KINDS[kind][0]], KINDS[kind][1])
    build_model("llama", "eager").save_pretrained(tmp_path / "plain")
    changed = build_model(
        "llama", "eager", rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=64
    )
    changed.save_pretrained(tmp_path / "changed")
    config = (
        load(None, [f"model.from_pretrained={tmp_path / 'plain'}", *settings])
        .model_source()
        .files.config
    )
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if kind == "yarn" else {}
    assert config.rope_parameters == {"rope_theta": 1e4, **defaults, **rope}
    loss, gradients, _ = reference(tmp_path / "changed")
    assert abs(reference(tmp_path / "plain")[0] - loss) > 1e-4, (
        "a RoPE that changes nothing proves nothing"
    )
    (found_loss, found_gradients, _), _ = workers.run(step, 2, tmp_path / "plain", settings)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert largest_error(found_gradients, gradients) < 1e-4


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 3.0},
    "yarn": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 128,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "attention_factor": 1.2,
    },
}
"""RoPE of checkpoints, with all fields of their types."""
NAMED: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_theta": 8e6},
    "rope_scaling.factor": {"factor": 8.0},
}
"""What a setting changes in a config."""


ROPES = [
    *(("llama", old) for old in SCALED),
    *((kind, old) for kind in ("gpt_oss", "deepseek_v3") for old in ("yarn", "mscale")),
    ("gemma3_text", "linear"),
]


@pytest.mark.parametrize(
    ("kind", "old", "setting"),
    slow_unless(
        lambda _, old, setting: setting == "rope_scaling.factor" or old in ("dynamic", "longrope"),
        [(*rope, setting) for rope in ROPES for setting in NAMED],
    ),
)
def test_a_change_of_rope_keeps_the_rest(
    workers: Workers, tmp_path: Path, kind: str, old: str, setting: str
) -> None:
    before = {"rope_theta": 1e4, **SCALED[old]}

    def whole(rope: dict[str, Any]) -> dict[str, Any]:
        sliding = {"rope_type": "default", "rope_theta": 1e3}
        return (
            {"full_attention": rope, "sliding_attention": sliding}
            if kind == "gemma3_text"
            else rope
        )

    layers = (
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        if kind == "gemma3_text"
        else {}
    )
    made: dict[str, Any] = {"max_position_embeddings": 128, **layers}
    build_model(kind, "eager", **made, rope_parameters=whole(before)).save_pretrained(
        tmp_path / "plain"
    )
    value = next(iter(NAMED[setting].values()))
    settings = [f"model.{setting}={value}"]
    if setting == "rope_scaling.factor" and old in ("default", "longrope"):
        with pytest.raises(
            ConfigError,
            match=r"(?s)rope_type is not set.*omit them to keep the checkpoint's RoPE",
        ):
            load(None, [f"model.from_pretrained={tmp_path / 'plain'}", *settings])
        return
    config = (
        load(None, [f"model.from_pretrained={tmp_path / 'plain'}", *settings])
        .model_source()
        .files.config
    )
    wanted = transformers.AutoConfig.from_pretrained(tmp_path / "plain")
    wanted.rope_parameters = whole({**before, **NAMED[setting]})
    if setting == "rope_scaling.factor" and old == "linear":
        wanted.max_position_embeddings = 512  # 128 were reached with a factor of 2
    assert config.to_dict() == wanted.to_dict()
    model = build_model(kind, "eager", **made, rope_parameters=whole(before))
    model.config = wanted
    model.save_pretrained(tmp_path / "changed")
    loss = reference(tmp_path / "changed")[0]
    if old != "dynamic" or setting == "rope_theta":  # its factor acts above the maximum length
        assert abs(reference(tmp_path / "plain")[0] - loss) > 1e-5, (
            "a RoPE that changes nothing proves nothing"
        )
    ((found_loss, _, _),) = workers.run(step, 1, tmp_path / "plain", settings)
    assert found_loss == pytest.approx(loss, rel=1e-5)


def test_naming_the_type_keeps_its_fields_and_another_type_replaces_them(tmp_path: Path) -> None:
    def changed(old: str, *settings: str) -> Any:
        made = {
            "rope_parameters": {"rope_theta": 1e4, **SCALED[old]},
            "max_position_embeddings": 128,
        }
        build_model("llama", "eager", **made).save_pretrained(tmp_path / old)
        given = [f"model.from_pretrained={tmp_path / old}", *(f"model.{each}" for each in settings)]
        return load(None, given).model_source().files

    yarn = {"rope_theta": 1e4, **SCALED["yarn"]}
    assert changed(
        "yarn", "rope_scaling.rope_type=yarn", "rope_scaling.factor=16.0"
    ).config.rope_parameters == {
        **yarn,
        "factor": 16.0,
    }
    assert changed("yarn", "rope_scaling.beta_fast=16.0").config.rope_parameters == {
        **yarn,
        "beta_fast": 16.0,
    }
    assert changed("llama3", "rope_scaling.rope_type=default").config.rope_parameters == {
        "rope_theta": 1e4,
        "rope_type": "default",
    }
    found = changed("llama3", "rope_scaling.rope_type=yarn", "rope_scaling.factor=16.0").config
    assert found.rope_parameters == {
        "rope_theta": 1e4,
        **YARN,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert found.max_position_embeddings == 256
    for settings, named in (
        (
            ["rope_scaling.rope_type=yarn", "rope_scaling.factor=16"],
            "set original_max_position_embeddings",
        ),
        (
            ["rope_scaling.rope_type=ntk", "rope_scaling.factor=16"],
            "ntk, which cannot replace the checkpoint's RoPE of type linear",
        ),
        (["rope_scaling.beta_fast=16"], "RoPE of type linear has no beta_fast"),
    ):
        with pytest.raises(ConfigError, match=named):
            changed("linear", *settings)


def test_layers_with_a_window_keep_their_rope(tmp_path: Path) -> None:
    build_model("gemma3_text", "eager").save_pretrained(tmp_path)
    config = load(
        None,
        [
            f"model.from_pretrained={tmp_path}",
            "model.rope_scaling.rope_type=linear",
            "model.rope_scaling.factor=8.0",
        ],
    )
    changed, plain = (
        config.model_source().files.config,
        transformers.AutoConfig.from_pretrained(tmp_path),
    )
    assert (
        changed.rope_parameters["sliding_attention"] == plain.rope_parameters["sliding_attention"]
    )
    assert changed.rope_parameters["full_attention"]["factor"] == 8.0
    assert changed.max_position_embeddings == 8 * plain.max_position_embeddings


def test_the_rotated_part_of_a_head() -> None:
    sizes = SimpleNamespace(hidden_size=96, num_attention_heads=4)
    assert _rotated_dim(sizes, {}) == 24
    sizes.head_dim = 16
    assert _rotated_dim(sizes, {"partial_rotary_factor": 0.25}) == 4


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("gpt2", ["rope_theta=1e5"], "gpt2 has no rotary position embedding"),
        ("llama", ["rope_scaling.rope_type=yarn"], "factor is 1.0: give a factor greater than 1"),
        ("llama", ["rope_scaling.factor=4.0"], "rope_type is not set"),
        ("llama", ["overrides.hidden_size=64"], "sizes are taken from the checkpoint"),
    ],
)
def test_what_a_checkpoint_cannot_take_is_refused(
    tmp_path: Path, kind: str, settings: list[str], named: str
) -> None:
    build_model(kind, "eager").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=named):
        load(None, [f"model.from_pretrained={tmp_path}", *(f"model.{each}" for each in settings)])
