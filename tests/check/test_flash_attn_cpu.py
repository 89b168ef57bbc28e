"""extras/flash_attn_cpu against plain attention in float64."""

import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, strategies

FOLDER = Path(__file__).parents[2] / "extras" / "flash_attn_cpu" / "flash_attn"
NAME = "flash_attn_of_extras"
"""Not `flash_attn`: other libraries would take that for flash-attn itself."""


def loaded(part: str) -> ModuleType:
    """Returns a module of the package, or the package for an empty name."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.{part}") if part else sys.modules[NAME]


flash = loaded("flash_attn_interface")
padding = loaded("bert_padding")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes]


def cumulated(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and sums of one sequence, query after query and head after head, as
    flash-attn's documentation has it."""
    queries, heads, width = q.shape
    keys = len(k)
    of_each = heads // k.shape[1]
    out = []
    sums = []
    for query in range(queries):
        place = query + keys - queries
        first = 0 if window[0] < 0 else max(0, place - window[0])
        last = keys - 1 if window[1] < 0 else min(keys - 1, place + window[1])
        if causal:
            last = min(last, place)
        seen = list(range(first, last + 1))
        for head in range(heads):
            if not seen:
                out.append(torch.zeros(width, dtype=q.dtype))
                sums.append(torch.tensor(float("inf"), dtype=q.dtype))
                continue
            scores = k[seen, head // of_each] @ q[query, head] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(torch.softmax(scores, dim=0) @ v[seen, head // of_each])
            sums.append(torch.logsumexp(scores, dim=0))
    if not out:
        return q.new_zeros(q.shape), q.new_zeros(heads, 0)
    return torch.stack(out).view(q.shape), torch.stack(sums).view(queries, heads).T


def plain_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: tuple[Any, Any], **rules: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and sums of sequences, each by itself."""
    pieces = []
    for (first, last), (first_key, last_key) in zip(*map(pairwise, ends), strict=True):
        keys = slice(first_key, last_key)
        pieces.append(plain(q[first:last], k[keys], v[keys], **rules))
    return torch.cat([out for out, _ in pieces]), torch.cat([sums for _, sums in pieces], dim=1)


def require_same(found: torch.Tensor, wanted: torch.Tensor, within: float = 1e-10) -> None:
    """Fails for a difference, also one of NaN; infinities have to be the same ones."""
    assert found.shape == wanted.shape
    assert torch.equal(found.isinf(), wanted.isinf())
    difference = (found - wanted)[~wanted.isinf()].abs()
    assert (difference <= within).all(), float(difference.max())


LENGTHS = strategies.lists(
    strategies.tuples(strategies.integers(0, 5), strategies.integers(0, 5)), min_size=1, max_size=3
)
WINDOWS = strategies.tuples(strategies.integers(-1, 4), strategies.integers(-1, 4))
RULES = {
    "causal": strategies.booleans(),
    "window": WINDOWS,
    "softcap": strategies.sampled_from([0.0, 0.7]),
}


@given(lengths=LENGTHS, heads=strategies.sampled_from([(2, 2), (4, 2), (3, 1)]), **RULES)
def test_packed_sequences_are_plain_attention(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> None:
    """Forward and backward: queries more or fewer than keys, none of one or the other."""
    queries = [query for query, _ in lengths]
    keys = [key for _, key in lengths]
    ends = cumulated(queries), cumulated(keys)
    q, k, v, dout = tensors(
        (sum(queries), heads[0], 4),
        (sum(keys), heads[1], 4),
        (sum(keys), heads[1], 4),
        (sum(queries), heads[0], 4),
    )
    inputs = [each.requires_grad_() for each in (q, k, v)]
    sizes = (max(queries), max(keys))
    out, sums, _ = flash.flash_attn_varlen_func(
        *inputs,
        *ends,
        *sizes,
        softmax_scale=0.9,
        causal=causal,
        window_size=window,
        softcap=softcap,
        return_attn_probs=True,
    )
    lists = tuple(each.tolist() for each in ends)
    rules = {"scale": 0.9, "causal": causal, "window": window, "softcap": softcap}
    wanted, wanted_sums = plain_packed(*inputs, lists, **rules)
    require_same(out, wanted)
    require_same(sums, wanted_sums)
    found = torch.autograd.grad(out, inputs, dout)
    none = sum(0 * each.sum() for each in inputs)  # where no query sees a key
    expected = torch.autograd.grad((wanted * dout).sum() + none, inputs)
    for gradient, other in zip(found, expected, strict=True):
        require_same(gradient, other)


@pytest.mark.parametrize(
    ("causal", "window", "softcap"), [(True, (2, 0), 0.0), (False, (-1, -1), 0.5)]
)
def test_private_functions_are_the_public_ones(
    causal: bool, window: tuple[int, int], softcap: float
) -> None:
    """Of rows, and of the same tokens packed."""
    q, k, v, dout = tensors((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 4, 8))
    inputs = [each.requires_grad_() for each in (q, k, v)]
    wanted, sums, _ = flash.flash_attn_func(
        *inputs, causal=causal, window_size=window, softcap=softcap, return_attn_probs=True
    )
    gradients = torch.autograd.grad(wanted, inputs, dout)
    q, k, v = (each.detach() for each in inputs)
    rules = (0.0, 8**-0.5, causal, *window, softcap, None)
    out, found, _, state = flash._flash_attn_forward(q, k, v, *rules, False)
    require_same(out, wanted)
    require_same(found, sums)
    written = [torch.full_like(each, float("nan")) for each in (q, k, v)]
    flash._flash_attn_backward(dout, q, k, v, out, found, *written, *rules, False, state)
    for each, gradient in zip(written, gradients, strict=True):
        require_same(each, gradient)

    ends = cumulated([5, 5])
    packed = [each.flatten(0, 1) for each in (q, k, v)]
    sequences = (ends, ends, 5, 5)
    out, found, _, state = flash._flash_attn_varlen_forward(*packed, *sequences, *rules)
    require_same(out, wanted.flatten(0, 1))
    require_same(found, sums.transpose(0, 1).flatten(1))
    written = [torch.full_like(each, float("nan")) for each in packed]
    inner = flash._flash_attn_varlen_backward(
        dout.flatten(0, 1), *packed, out, found, *written, *sequences, *rules, False, state
    )
    for each, gradient in zip(written, gradients, strict=True):
        require_same(each, gradient.flatten(0, 1))
    require_same(inner, (dout.flatten(0, 1) * out).sum(-1).T)


def test_parts_of_keys_add_up_as_in_a_ring() -> None:
    """Outputs merge by their sums; backward with the sums of all keys gives each part's share."""
    q, k, v, dout = tensors((1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    rules = (0.0, 8**-0.5, False, -1, -1, 0.0, None)
    whole, all_sums, _, _ = flash._flash_attn_forward(q, k, v, *rules, False)
    parts = [slice(0, 4), slice(4, 6)]
    merged = torch.zeros_like(q)
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for part in parts:
        keys, values = k[:, part], v[:, part]
        out, sums, _, _ = flash._flash_attn_forward(q, keys, values, *rules, False)
        merged += out * torch.exp(sums - all_sums).transpose(1, 2)[..., None]
        mine = torch.empty_like(q)
        flash._flash_attn_backward(
            dout, q, keys, values, whole, all_sums, mine, dk[:, part], dv[:, part], *rules, False
        )
        dq += mine
    require_same(merged, whole)
    written = [torch.empty_like(each) for each in (q, k, v)]
    flash._flash_attn_backward(dout, q, k, v, whole, all_sums, *written, *rules, False)
    for found, wanted in zip((dq, dk, dv), written, strict=True):
        require_same(found, wanted)


def test_half_precision_is_computed_in_float32() -> None:
    q, k, v = tensors((9, 2, 8), (9, 2, 8), (9, 2, 8), dtype=torch.bfloat16)
    ends = cumulated([4, 5])
    out, sums, _ = flash.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, return_attn_probs=True)
    wide = [each.float() for each in (q, k, v)]
    wanted, wanted_sums, _ = flash.flash_attn_varlen_func(
        *wide, ends, ends, 5, 5, return_attn_probs=True
    )
    assert out.dtype == torch.bfloat16 and sums.dtype == torch.float32
    assert torch.equal(out, wanted.bfloat16())
    assert torch.equal(sums, wanted_sums)


def test_packed_arguments_are_the_same_function() -> None:
    q, k, v = tensors((2, 3, 2, 8), (2, 3, 2, 8), (2, 3, 2, 8))
    wanted = flash.flash_attn_func(q, k, v, causal=True)
    kv = torch.stack([k, v], dim=2)
    qkv = torch.stack([q, k, v], dim=2)
    ends = cumulated([3, 3])
    assert torch.equal(flash.flash_attn_kvpacked_func(q, kv, causal=True), wanted)
    assert torch.equal(flash.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    flat = flash.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), ends, 3, causal=True)
    assert torch.equal(flat.view_as(wanted), wanted)
    flat = flash.flash_attn_varlen_kvpacked_func(
        q.flatten(0, 1), kv.flatten(0, 1), ends, ends, 3, 3, causal=True
    )
    assert torch.equal(flat.view_as(wanted), wanted)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dropout_p": 0.1}, "no dropout_p"),
        ({"alibi_slopes": torch.zeros(2)}, "no alibi_slopes"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "no block_table"),
        ({"leftpad_k": torch.zeros(1, dtype=torch.int32)}, "no leftpad_k"),
        ({"seqused_k": torch.zeros(1, dtype=torch.int32)}, "no seqused_k"),
        ({"return_softmax": True}, "no return_softmax"),
        ({"max_seqlen_k": 2}, "max_seqlen_k is 2, and a sequence has 3 tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "q has 3 tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, "not one row of int32"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32)}, "q has 2 sequences"),
        ({"k": torch.zeros(3, 2, 8, dtype=torch.bfloat16)}, "k is torch.bfloat16"),
        ({"k": torch.zeros(3, 1, 8), "v": torch.zeros(3, 2, 8)}, "k is .3, 1, 8., and v is"),
        ({"k": torch.zeros(3, 3, 8), "v": torch.zeros(3, 3, 8)}, "no multiple of 3 of keys"),
        ({"k": torch.zeros(3, 2, 4), "v": torch.zeros(3, 2, 4)}, "8 wide, of keys 4"),
        ({"q": torch.zeros(3, 2, 4), "k": torch.zeros(3, 2, 4), "v": torch.zeros(3, 2, 4)}, "of 8"),
        ({"q": torch.zeros(3, 2, 8, device="meta")}, "q is on meta, and .* is for CPUs"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments: dict[str, Any], words: str) -> None:
    ends = cumulated([3])
    given = {name: torch.zeros(3, 2, 8) for name in "qkv"}
    given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 3, "max_seqlen_k": 3}
    given |= {"dropout_p": 0.0, "softmax_scale": 1.0, "causal": True}
    flash._flash_attn_varlen_forward(**given)
    with pytest.raises((ValueError, NotImplementedError), match=words):
        flash._flash_attn_varlen_forward(**given | arguments)


def test_unknown_arguments_caches_and_wrong_gradients_are_refused() -> None:
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(TypeError, match="unknown"):
        flash.flash_attn_func(q, q, q, unknown=1)
    with pytest.raises(NotImplementedError, match="no cache"):
        flash.flash_attn_with_kvcache(q, q, q)
    rules = (0.0, 1.0, True, -1, -1, 0.0, None)
    out, sums, _, _ = flash._flash_attn_forward(q, q, q, *rules, False)
    with pytest.raises(ValueError, match=r"dk is torch\.float64"):
        flash._flash_attn_backward(
            q, q, q, q, out, sums, q.clone(), q.double(), q.clone(), *rules, False
        )


def test_padding_is_taken_out_and_put_back() -> None:
    (rows,) = tensors((2, 4, 3))
    rows.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    tokens, indices, ends, longest, used = padding.unpad_input(rows, mask)
    assert indices.tolist() == [0, 1, 4, 5, 6] and longest == 3
    assert ends.tolist() == [0, 2, 5] and ends.dtype == torch.int32 and used.tolist() == [2, 3]
    back = padding.pad_input(tokens, indices, 2, 4)
    assert torch.equal(back, rows * mask[..., None])
    (gradient,) = torch.autograd.grad(back.sum(), rows)
    assert torch.equal(gradient, mask[..., None].expand_as(rows).double())
    kept, *_, used = padding.unpad_input(rows, mask, torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]]))
    assert len(kept) == 6 and used.tolist() == [2, 3]


def test_version_is_the_one_whose_functions_these_are() -> None:
    """A library that asks gets one answer."""
    project = (FOLDER.parent / "pyproject.toml").read_text()
    assert loaded("").__version__ == "2.8.3"
    assert 'version = "2.8.3"' in project


FLASH_IN_TRANSFORMERS = """
import torch
from flash_attn.transformers_on_cpu import allow

allow()
from transformers import MistralConfig, MistralForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
config = MistralConfig(**sizes, **heads, sliding_window=4, initializer_range=0.2)
model = MistralForCausalLM(config)
ids = torch.arange(20)[None]
positions = torch.cat([torch.arange(8), torch.arange(12)])[None]  # two documents
model.set_attn_implementation("flash_attention_2")
packed = model(ids, position_ids=positions, use_cache=False).logits
model.set_attn_implementation("eager")
alone = [model(part, use_cache=False).logits for part in ids.split([8, 12], dim=1)]
assert torch.allclose(packed, torch.cat(alone, dim=1), atol=1e-4)
"""


@pytest.mark.slow
def test_transformers_take_it_for_flash_attn() -> None:
    """Packed documents with windows, in a process of its own: others do not see the module."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    run = subprocess.run(
        [sys.executable, "-c", FLASH_IN_TRANSFORMERS],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
