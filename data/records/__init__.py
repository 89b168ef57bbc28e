"""Records: what files and data sets say, as texts, conversations or token ids, and how these become
tokens.

`corpus` finds the records (`readers`, `megatron`), `formats` parses one, `template` renders
conversations, and `tokenizer` encodes.
"""
