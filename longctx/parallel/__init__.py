"""Process groups and the ways to spread a model over them."""
