"""The native decoder in plain single-device PyTorch, and models of transformers; attention and head are arguments of both.

The modules stand side by side in three groups: `protocol` and `source` say what a model is; `presets`, `decoder` and
their layers are the native one; `huggingface`, `families`, `lora` and `checkpoint_files` are those of transformers.
"""
