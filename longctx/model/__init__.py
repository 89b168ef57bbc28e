"""A Llama-style decoder in plain single-device PyTorch; attention and head are handed in."""
