"""Training: the loop, loss, optimizer, checkpoints and metrics."""
