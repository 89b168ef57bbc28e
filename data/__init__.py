"""From text to packed micro-batches: corpus, tokenizer, store, sampler, packing, loader."""

if __name__ != "longctx.data":
    raise ImportError("import this package as `longctx.data`, not by its folder's bare name `data`")

IGNORED_LABEL = -100
"""Label of a position without a target; the value that PyTorch's and transformers' losses ignore by default."""
