"""Flash-attn 4: a beta, so its functions are private and may change with every version. Only the
tested version is used."""

import inspect
import os
import stat
import tempfile
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from longctx.attention.kernels.contract import Gradients, KernelRequest, Options
from longctx.attention.kernels.flash_library import (
    HOPPER_OR_BLACKWELL,
    Capability,
    Sequences,
    import_error,
    shared_options,
    too_large,
    unequal,
)

TESTED = "4.0.0b36"
"""The version whose functions were read; pyproject.toml's extra `flash` installs it."""

INSTALL = f"pip install flash-attn-4=={TESTED}"

ARGUMENTS = {
    "_flash_attn_fwd": ["q", "k", "v"],
    "_flash_attn_bwd": ["q", "k", "v", "out", "dout", "lse"],
}
"""First positional arguments of its functions."""

OPTIONS = {
    "causal",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "softcap",
    "window_size_left",
    "window_size_right",
}
"""Keyword arguments that both functions must have."""


HOPPER = 9
LARGE = ((256, 256), (192, 128))
"""Head sizes of k and of v above 128 that it supports."""


def missing() -> str | None:
    """Returns why the tested version is not available, or None.

    Flash-attn 2.8.3 installs an older copy of the same modules, without what is needed here.
    """
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        return f"not installed: {INSTALL}"
    if installed != TESTED:
        return (
            f"{installed} is installed, but only {TESTED} is known to work, as its functions "
            f"are private: {INSTALL}"
        )
    _keep_compiled()
    why = import_error("flash_attn.cute.interface")
    if why is not None:
        return f"{why}: {INSTALL}"
    module = import_module("flash_attn.cute.interface")
    for name, first in ARGUMENTS.items():
        names = list(inspect.signature(getattr(module, name)).parameters)
        if names[: len(first)] != first or OPTIONS - set(names):
            return (
                f"another package replaced its modules ({name} has other arguments): {INSTALL} "
                "--force-reinstall --no-deps"
            )
    return None


def _keep_compiled() -> None:
    """Lets it keep compiled kernels for other processes and runs, in a folder that only this user
    can write.

    It reads these variables when it is imported. Variables that are set already win.
    """
    folder = Path(tempfile.gettempdir()) / f"longctx-{os.getuid()}"
    with suppress(OSError):  # without the folder, every process compiles for itself
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.getuid()
            and not about.st_mode & 0o022
        ):
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
            os.environ.setdefault(
                "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash-attn-4")
            )


def refusal(request: KernelRequest, capability: Capability) -> str | None:
    if capability[0] not in HOPPER_OR_BLACKWELL:
        # On other GPUs it is not faster than flash-attn 2.
        return f"is used only on Hopper and data-center Blackwell, not on capability {capability}"
    sizes = request.head_dim, request.v_head_dim
    if sizes in LARGE:
        return _refusal_of_large(request, is_hopper=capability[0] == HOPPER)
    # Its own tests cover backward up to head size 128, and unequal sizes only as in `LARGE`.
    return unequal(request) or too_large(request, 128)


def _refusal_of_large(request: KernelRequest, *, is_hopper: bool) -> str | None:
    """Returns why a request of large heads is not supported, by what compiles for each GPU."""
    sizes = f"head sizes {request.head_dim} and {request.v_head_dim}"
    if request.deterministic:
        return f"supports {sizes} only without a deterministic backward"
    if is_hopper:
        # 192 and 128 need as many heads of keys as of queries there, which a request does not say.
        return unequal(request)
    if unequal(request) is None and (request.bands or request.softcap):
        return f"supports {sizes} on Blackwell only without windows and soft caps"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, options: Options
) -> tuple[Tensor, Tensor]:
    results = import_module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, return_lse=True, **_options(sequences, options)
    )
    return results[0], results[1]


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    options: Options,
) -> Gradients:
    gradients: Gradients = import_module("flash_attn.cute.interface")._flash_attn_bwd(
        q, k, v, out, dout, lse, deterministic=options.deterministic, **_options(sequences, options)
    )
    return gradients


def _options(sequences: Sequences, options: Options) -> dict[str, Any]:
    longest = sequences.longest_q, sequences.longest_k
    window = sequences.left, sequences.right
    return {"causal": sequences.causal, **shared_options(sequences, options, longest, window)}
