"""From text to packed micro-batches.

The modules stand side by side in the order of that path: `corpus`, `readers`, `formats` and `messages` read; `tokenizer`,
`pretrained`, `chat`, `template` and `markup` encode; `request`, `prepare`, `store_folder` and `writer` write a store; `store`,
`sampler`, `mixture`, `packing` and `loader` read it for training.
"""

if __name__ != "longctx.data":
    raise ImportError("import this package as `longctx.data`, not by its folder's bare name `data`")

IGNORED_LABEL = -100
"""Label of a position without a target; the value that PyTorch's and transformers' losses ignore by default."""
