"""Tensor parallelism: find layers that can be cut over ranks, cut them, and compare the results."""
