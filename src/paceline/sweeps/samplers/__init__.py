"""Samplers: which point the next trial gets. Random and grid need the standard library alone; the others are Optuna's."""
