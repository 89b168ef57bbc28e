"""Saved: what a run leaves on disk: its folder, checkpoints, model files and exports."""
