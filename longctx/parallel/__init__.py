"""Process groups, and the parallelisms that split a model over them."""
