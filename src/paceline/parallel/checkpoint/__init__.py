"""Checkpoints that any layout can write and any other can read."""
