"""From text to packed micro-batches: corpus, tokenizer, store, sampler, packing, loader."""

if __name__ != "longctx.data":
    raise ImportError("import this package as `longctx.data`, not by its folder's bare name `data`")

IGNORED_LABEL = -100
"""The label of a token after which nothing is to be predicted; the value that PyTorch's and transformers' losses leave out."""
