"""Checkpoints of transformers in the native decoder: weights, loss and gradients for every split,
and refused checkpoints."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional as F

from longctx.cli import main
from longctx.hf.source import pretrained
from longctx.hf.spec import _matrix
from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
from longctx.model.families import FAMILIES, expressed
from longctx.model.presets import PRESETS, NoNativeModel
from longctx.model.pretrained_decoder import PretrainedDecoder
from longctx.model.translation import canonical
from tests.huggingface_cases import SPECIAL
from tests.native_cases import BASE, CASES, as_saved, attention_of, build
from tests.pretrained_cases import largest_error


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in CASES:
        build(name).save_pretrained(folder / name)
    return {name: folder / name for name in CASES}


LENGTH = 61
TOKENS = torch.randint(0, BASE["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(1))


def native(checkpoint: Path) -> PretrainedDecoder:
    """The native decoder with a checkpoint's weights, in float64."""
    source = pretrained(str(checkpoint), (), "native", False)
    assert source.description == "the native decoder runs it, as model.implementation says"
    ours = source.build()
    ours.initialize(0)
    return ours.double()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(
    checkpoints: dict[str, Path], name: str
) -> None:
    ours = native(checkpoints[name])
    # torch's grouped product has no float64.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[name], **plain).double()
    logits, wanted = (
        ours(TOKENS, torch.arange(LENGTH), attention_of(ours, LENGTH)),
        theirs(TOKENS[None]).logits[0],
    )
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    for out in (logits, wanted):
        F.cross_entropy(out[:-1], TOKENS[1:]).backward()
    gradients = {key: weight.grad for key, weight in theirs.named_parameters()}
    found = ours.to_checkpoint({key: weight.grad for key, weight in ours.named_parameters()})
    assert largest_error(found, as_saved(CASES[name][0], gradients)) < 1e-4


def test_stacked_experts_that_all_tokens_use_are_no_experts_of_a_router() -> None:
    shared, routed = (_matrix(torch.empty(count, 6, 4), experts=8, chosen=2) for count in (3, 8))
    assert (shared.count, shared.used, routed.count, routed.used) == (3, 3, 8, 2)
    assert shared.size == routed.size == 24


@pytest.mark.parametrize("name", CASES)
def test_the_spec_counts_what_the_model_has(checkpoints: dict[str, Path], name: str) -> None:
    ours = native(checkpoints[name])
    assert ours.spec.parameters == sum(parameter.numel() for parameter in ours.parameters())
    for layer, block in zip(ours.spec.layers, ours.layers, strict=True):
        matrices = {name: weight for name, weight in block.named_parameters() if weight.dim() > 1}
        assert layer.matrix_parameters + layer.idle_parameters == sum(
            weight.numel() for weight in matrices.values()
        )
        of_experts = [weight.numel() for name, weight in matrices.items() if ".experts." in name]
        assert layer.expert_parameters == sum(of_experts)
        shapes = Counter(
            tuple(weight.shape) for name, weight in matrices.items() if ".experts." not in name
        )
        assert (
            Counter((each.rows, each.columns) for each in layer.matrices if each.role != "expert")
            == shapes
        )
        assert layer.vectors == sum(
            weight.numel() for weight in block.parameters() if weight.dim() == 1
        )
    lengths = [5, LENGTH]
    pairs = sum(
        min(length, at + 1, layer.window or length)
        for layer in ours.spec.layers
        for length in lengths
        for at in range(length)
    )
    counted = ours.spec.flops(lengths) - 2 * ours.spec.multiplied_parameters * sum(lengths)
    assert counted == pytest.approx(4 * 4 * 8 * pairs, rel=0.15), "a query's own key counts half"


WINDOWS = {"sliding_window": 7, "use_sliding_window": True}
UNEVEN = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
OTHER_FAMILY = "and only llama, mistral"


def rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act is relu, and only silu, swish are"),
    ("llama", {"residual_multiplier": 0.5}, "residual_multiplier 0.5"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ("olmo2", {}, f"model_type is olmo2, {OTHER_FAMILY}"),
    ("gemma2", {}, f"model_type is gemma2, {OTHER_FAMILY}"),
    ("gpt2", SPECIAL["gpt2"], f"model_type is gpt2, {OTHER_FAMILY}"),
    (
        "qwen3_moe",
        {"mlp_only_layers": [1]},
        r"mlp_only_layers is \[1\], and only the first layers may have",
    ),
    (
        "qwen3",
        {**WINDOWS, "layer_types": UNEVEN},
        "layer_types has full_attention in layers other than every n-th",
    ),
    ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention"),
    ("llama", rope("dynamic", factor=4.0), "rope_parameters has type dynamic"),
    (
        "llama",
        rope("yarn", **YARN, attention_factor=1.0),
        "rope_parameters has attention_factor 1.0",
    ),
    (
        "llama",
        rope("default", partial_rotary_factor=0.5),
        "partial_rotary_factor 0.5, and only whole heads are supported",
    ),
]


@pytest.mark.parametrize(("kind", "settings", "message"), CHANGES)
def test_what_the_native_decoder_lacks_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    transformers.AutoConfig.for_model(kind, **{**BASE, **settings}).save_pretrained(tmp_path)
    (tmp_path / "tensors.json").write_text("{}")
    with pytest.raises(PretrainedError, match=message) as refusal:
        pretrained(str(tmp_path), (), "native", False)
    assert str(refusal.value).endswith("; choose model.implementation transformers")
    with pytest.raises(
        PretrainedError, match=r"set parallel\.tensor_parallel_size, parallel\.pipeline_p"
    ):
        pretrained(str(tmp_path), (), "auto", True)


def test_every_field_of_a_config_is_known_or_refused() -> None:
    """A field added by a later version of transformers is refused, unless it has its default."""
    for kind, family in FAMILIES.items():
        config = transformers.AutoConfig.for_model(kind)
        shape = family.shape(config)
        for name, value in config.to_dict().items():
            if isinstance(value, bool) and name not in ("tie_word_embeddings", "norm_topk_prob"):
                changed = copy.deepcopy(config)
                setattr(changed, name, not value)
                try:
                    same = family.shape(changed) == shape
                except NoNativeModel:
                    continue
                harmless = {
                    "output_hidden_states",
                    "return_dict",
                    "is_encoder_decoder",
                    "use_cache",
                    "output_attentions",
                }
                harmless |= {"output_router_logits", "use_sliding_window"}
                assert same and name in harmless, (kind, name)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def load_all(source: str) -> None:
    pretrained(source, (), "native", False).build().initialize(0)


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    build("Qwen 2").save_pretrained(tmp_path)
    files = CheckpointFiles.open(str(tmp_path))
    tensors = {name: files.read(name) for name in files.files}
    load_all(str(tmp_path))
    some = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(PretrainedError, match=f"lacks {some}: give a checkpoint of the whole"):
        load_all(
            rewrite(tmp_path, {name: tensor for name, tensor in tensors.items() if name != some})
        )
    with pytest.raises(
        PretrainedError, match=rf"{some} has shape \(47, 32\), not \(48, 32\); give the config"
    ):
        load_all(rewrite(tmp_path, {**tensors, some: tensors[some][:47].clone()}))
    with pytest.raises(
        PretrainedError, match=r"has model\.layers\.0\.self_attn\.q_norm\.weight, which Qwen2"
    ):
        load_all(
            rewrite(tmp_path, {**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
        )
    load_all(
        rewrite(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    )
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(PretrainedError, match="is damaged"):
        load_all(str(tmp_path))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_config_alone_is_enough_for_estimates(
    checkpoints: dict[str, Path],
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    implementation: str,
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints["Qwen 3"] / "config.json").read_bytes())
    said = []
    for folder in (checkpoints["Qwen 3"], tmp_path):
        settings = [
            f"--model.from_pretrained={folder}",
            f"--model.implementation={implementation}",
            f"--data.store={store}",
        ]
        assert main(["estimate", "--json", "--gpus=2", *settings]) == 0
        content = json.loads(capsys.readouterr().out)
        said.append([content[name] for name in ("configured", "started", "step_s", "choices")])
    assert said[0] == said[1] and said[0][0]["total"] > 0
    assert main(["train", *settings, f"--train.run_dir={tmp_path / 'run'}"]) == 2
    assert (
        f"{tmp_path} has no .safetensors files: save the model with transformers"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"Phi 3"}))  # whose shapes Llama has, too
def test_a_shape_finds_its_family(name: str) -> None:
    """A shape made from a config of transformers gives the same family, with a config of the same
    shape."""
    kind = CASES[name][0]
    wanted = FAMILIES[kind].shape(build(name).config)
    family, config = expressed(wanted, longest=64)
    assert (family.kind, family.shape(config)) == (kind, wanted)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "llama"),
        ({"rope_scaling": "ntk", "rope_factor": 4.0}, "llama"),
        ({"rope_scaling": "linear", "rope_factor": 1.0}, "llama"),
        ({"sliding_window": 64}, "mistral"),
        ({"sliding_window": 64, "full_attention_every": 1}, "llama"),
        ({"qk_norm": True, "sliding_window": 64, "full_attention_every": 2}, "qwen3"),
        ({"num_experts": 4}, "mixtral"),
        (
            {
                "num_experts": 4,
                "moe_intermediate_size": 8,
                "qk_norm": True,
                "first_dense_layers": 1,
            },
            "qwen3_moe",
        ),
    ],
)
def test_families_of_new_models(options: dict[str, Any], kind: str) -> None:
    shape = PRESETS["tiny"].model_copy(update={"vocab_size": 300, **options})
    family, config = expressed(shape, longest=64, end=7)
    assert family.kind == kind and family.shape(config) == canonical(shape)
    assert config.eos_token_id == 7 and config.max_position_embeddings == 64
    if kind == "llama":
        config.head_dim = None  # as in configs of older models
        assert family.shape(config).head_dim == shape.hidden_size // shape.num_attention_heads
