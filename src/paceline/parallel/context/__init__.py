"""Sequences in parts, one on each worker."""
