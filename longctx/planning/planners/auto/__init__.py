"""The search of mode auto over degrees and numbers of micro-batches."""
