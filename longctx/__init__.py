"""Long-context training in PyTorch with a context-parallel degree that changes with every batch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from longctx.attention import RingAttention, ring_attention
    from longctx.config import load as load_config
    from longctx.data.packing import pack_documents
    from longctx.data.store.prepare import prepare
    from longctx.data.store.store import Store
    from longctx.planning.hardware_profile import HardwareProfile
    from longctx.planning.plan import Plan
    from longctx.planning.planners.planner import make_plan
    from longctx.start import train

# Imported when first used, so that `import longctx` is quick and planning needs no torch.
_PLACES = {
    "HardwareProfile": "longctx.planning.hardware_profile:HardwareProfile",
    "Plan": "longctx.planning.plan:Plan",
    "RingAttention": "longctx.attention:RingAttention",
    "Store": "longctx.data.store.store:Store",
    "load_config": "longctx.config:load",
    "make_plan": "longctx.planning.planners.planner:make_plan",
    "pack_documents": "longctx.data.packing:pack_documents",
    "prepare": "longctx.data.store.prepare:prepare",
    "ring_attention": "longctx.attention:ring_attention",
    "train": "longctx.start:train",
}

__all__ = [
    "HardwareProfile",
    "Plan",
    "RingAttention",
    "Store",
    "__version__",
    "load_config",
    "make_plan",
    "pack_documents",
    "prepare",
    "ring_attention",
    "train",
]


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _PLACES[name].partition(":")
        value = getattr(import_module(module), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
