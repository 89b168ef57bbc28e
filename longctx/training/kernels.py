"""Attention kernels of a run: what its layers need, and what computes them."""

import logging
from collections.abc import Mapping

import torch

from longctx.attention.kernels import KernelRequest, choose_kernel, kernel_name
from longctx.attention.kernels.compilation import compile_variants
from longctx.config import Config
from longctx.parallel.environment import Launch
from longctx.planning.cost.spec import LayerSpec, ModelSpec


def kernel_requests(
    spec: ModelSpec, device: str, dtype: torch.dtype, deterministic: bool = False
) -> dict[LayerSpec, KernelRequest]:
    """Returns what the attention kernel has to support on a device of type `device`, for each kind
    of layer with attention."""
    requests = {}
    for layer in dict.fromkeys(spec.layers):
        if layer.attends:
            requests[layer] = KernelRequest(
                device,
                dtype,
                head_dim=layer.latent.key_dim or layer.head_dim,
                v_head_dim=layer.latent.value_dim or layer.head_dim,
                bands=layer.window is not None,
                softcap=bool(spec.attention_softcap),
                deterministic=deterministic,
            )
    return requests


def attention_requests(
    config: Config, spec: ModelSpec, device: str
) -> dict[LayerSpec, KernelRequest]:
    return kernel_requests(spec, device, getattr(torch, config.dtype), config.context.deterministic)


def prepare_kernels(
    kernel: str, requests: Mapping[LayerSpec, KernelRequest], tensor: int = 1
) -> str:
    """Returns the names of the kernels of a model's layers. On GPUs it compiles all their variants,
    so that no rank compiles one in a step, while others wait for its messages. `tensor` ranks share
    the heads. Raises KernelError.
    """
    for layer, request in requests.items():
        choose_kernel(kernel, request)
        if request.device == "cuda":
            heads = layer.num_attention_heads // tensor, layer.num_key_value_heads // tensor
            compile_variants(kernel, request, heads, window=layer.window is not None)
    return " and ".join(
        dict.fromkeys(kernel_name(kernel, request) for request in requests.values())
    )


def prepare_run_kernels(
    config: Config, spec: ModelSpec, launch: Launch, device: torch.device
) -> None:
    """Prepares a run's kernels before its processes join. On a GPU local rank 0 says why the
    fastest one was not chosen."""
    log = logging.getLogger("longctx.attention.kernels")
    if launch.local_rank > 0:
        log.setLevel(logging.ERROR)
    elif device.type == "cuda" and not log.handlers:
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler())
    requests = attention_requests(config, spec, device.type)
    prepare_kernels(config.context.kernel, requests, config.parallel.tensor_parallel_size)


def computed_by(config: Config, spec: ModelSpec, device: str) -> str:
    """Returns in words what computes on a device of type `device`: device, dtype, compiled blocks
    and attention kernels."""
    requests = attention_requests(config, spec, device).values()
    kernels = dict.fromkeys(kernel_name(config.context.kernel, request) for request in requests)
    float8 = "" if config.train.float8 is None else f", float8 {config.train.float8}"
    compiled = ", compiled blocks" * config.compiles(device, spec)
    return f"{device}, {config.dtype}{float8}{compiled}, attention by {' and '.join(kernels)}"
