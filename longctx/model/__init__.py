"""The native decoder in plain single-device PyTorch, and models of transformers; attention and head are arguments of both."""
