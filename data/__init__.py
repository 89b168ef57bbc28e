"""From text to packed micro-batches.

`records` reads files and encodes them, `store` keeps the tokens on disk, and the modules here read
them for training: `sampler` and `mixture` choose documents, `packing` and `trees` fill
micro-batches, and `loader` does so one step ahead.
"""

if __name__ != "longctx.data":
    raise ImportError("import this package as `longctx.data`, not by its folder's bare name `data`")

IGNORED_LABEL = -100
"""Label of a position without a target; the value that PyTorch's and transformers' losses ignore by
default."""

TRUNCATED = ("truncate_left", "truncate_right")
"""What may happen to documents that are too long: their beginning or their end is cut off."""
