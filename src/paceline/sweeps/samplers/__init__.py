"""Samplers, which propose the next trial's point. Random and grid need no package; the others use Optuna."""
