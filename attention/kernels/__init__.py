"""Attention kernels with one signature over segments (`contract`), and their selection."""

import logging
from functools import cache

from longctx.attention.kernels import cpu, reference, triton
from longctx.attention.kernels.contract import Kernel, KernelRequest, Options
from longctx.attention.kernels.flash import Flash
from longctx.errors import UserError

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelError",
    "KernelRequest",
    "Options",
    "choose_kernel",
    "kernel_name",
]

log = logging.getLogger(__name__)

KERNELS: dict[str, Kernel] = {
    "flash": Flash(),
    "cpu": cpu,
    "triton": triton,
    "reference": reference,
}
"""Kernels by name, in the order in which `auto` tries them."""


@cache
def choose_kernel(name: str, request: KernelRequest) -> Kernel:
    """Returns the kernel called `name`, or for `auto` the first one that supports the request; logs
    the choice once.

    Raises KernelError if the kernel does not exist or does not support the request.
    """
    if name not in ("auto", *KERNELS):
        raise KernelError(f"kernel is {name!r}: choose auto, {', '.join(KERNELS)}")
    refusals: list[str] = []
    for candidate, kernel in KERNELS.items() if name == "auto" else [(name, KERNELS[name])]:
        why = kernel.refusal(request)
        if why is None:
            passed_over = f" ({'; '.join(refusals)})" if refusals else ""
            chosen = f"{candidate}{passed_over}"
            log.info("attention of %s on %s: kernel %s", request.dtype, request.device, chosen)
            return kernel
        refusals.append(f"{candidate} {why}")
    raise KernelError(f"no attention kernel supports these tensors: {'; '.join(refusals)}")


def kernel_name(name: str, request: KernelRequest) -> str:
    """Returns the name of the kernel that `choose_kernel` returns; of the flash kernel, the name of
    its library."""
    kernel = choose_kernel(name, request)
    if isinstance(kernel, Flash):
        return kernel.chosen(request).name
    return next(key for key, other in KERNELS.items() if other is kernel)


class KernelError(UserError):
    """A kernel that does not exist or does not support the given tensors."""
