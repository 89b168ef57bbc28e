"""Pictures and terminal drawings of plans."""
