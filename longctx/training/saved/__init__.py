"""Saved: what a run leaves on disk: its folder, checkpoints, model files and exports.

A checkpoint is complete if state.json and the sizes of all files agree, and verified if their
checksums do, too.
"""
