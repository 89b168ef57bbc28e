"""From text to packed micro-batches: corpus, tokenizer, store, sampler, packing, loader."""

if __name__ != "longctx.data":
    raise ImportError("import this package as `longctx.data`, not by its folder's bare name `data`")
