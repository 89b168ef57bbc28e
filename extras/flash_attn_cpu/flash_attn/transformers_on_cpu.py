"""transformers on CPUs with `attn_implementation="flash_attention_2"`, which asks for a GPU."""

from typing import Any


def allow() -> None:
    """Lets transformers 5 find flash-attn 2 on a machine without a GPU: call it before a model is
    built."""
    import transformers.modeling_flash_attention_utils as flash
    import transformers.utils
    import transformers.utils.import_utils

    def available(*_: Any, **__: Any) -> bool:
        return True

    for module in (flash, transformers.utils, transformers.utils.import_utils):
        vars(module)["is_flash_attn_2_available"] = available
    second = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    second["general_availability_check"] = available
    second["pkg_availability_check"] = available
    second["supported_devices"] += ((available, "cpu"),)
