"""Observe a run's workers: stacks, hangs, stragglers, profiles and load. The package `node` runs on each node."""
