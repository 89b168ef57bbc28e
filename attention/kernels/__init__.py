"""Attention kernels behind one signature over segments (`contract`), and the choice among them."""

import logging
from functools import cache

from longctx.attention.kernels import cpu, reference, triton
from longctx.attention.kernels.contract import Kernel, Request
from longctx.attention.kernels.flash import Flash
from longctx.errors import UserError

__all__ = ["KERNELS", "Kernel", "KernelError", "Request", "choose_kernel"]

log = logging.getLogger(__name__)

KERNELS: dict[str, Kernel] = {"flash": Flash(), "cpu": cpu, "triton": triton, "reference": reference}
"""In the order in which `auto` asks them."""


@cache
def choose_kernel(name: str, request: Request) -> Kernel:
    """The kernel called `name`, or for `auto` the first that does what is asked; the log says which, and why, once.

    Raises KernelError if there is no such kernel, or if it cannot do it.
    """
    if name not in ("auto", *KERNELS):
        raise KernelError(f"kernel is {name!r}: choose auto, {', '.join(KERNELS)}")
    refusals: list[str] = []
    for candidate, kernel in KERNELS.items() if name == "auto" else [(name, KERNELS[name])]:
        why = kernel.refusal(request)
        if why is None:
            passed_over = f" ({'; '.join(refusals)})" if refusals else ""
            log.info("attention of %s on %s: kernel %s%s", request.dtype, request.device, candidate, passed_over)
            return kernel
        refusals.append(f"{candidate} {why}")
    raise KernelError(f"no attention kernel for this: {'; '.join(refusals)}")


class KernelError(UserError):
    """A kernel that does not exist or does not take the given tensors."""
