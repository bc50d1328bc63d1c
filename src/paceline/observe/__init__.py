"""Observe a run's workers: stacks, wait graph, stragglers, profiles and load; `node` runs on each node."""
