"""Stores: tokenized documents in Arrow files, written by `prepare` and read by spans (`store`)."""
