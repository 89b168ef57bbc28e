"""Pictures, terminal drawings and HTML pages of plans and of training runs."""
