"""Layouts in which every rank computes the whole model: replicated, or sharded."""
