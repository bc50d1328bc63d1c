"""Sweeps: one run for each point of a space, on any compute target, judged while they run."""
