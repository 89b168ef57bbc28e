"""Long-context training in PyTorch with a context-parallel degree that changes with every batch."""

__version__ = "0.1.0"
