"""Layouts in which every rank computes the whole model on its own rows: replicated, or sharded."""
