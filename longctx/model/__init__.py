"""What a model is (`protocol`), and the native decoder in plain single-device PyTorch; attention
and head are its arguments.

`presets` has shapes, `decoder` runs them, and `pretrained_decoder` fills them from a checkpoint
(`checkpoint_files`) of one of the `families` of transformers. Models that transformers' own code
runs are in `longctx.hf`.
"""
