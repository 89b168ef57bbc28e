"""The training loop and what it needs: loss, optimizer, checkpoints, metrics."""
