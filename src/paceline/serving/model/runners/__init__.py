"""Runners of models that are served directly, one module for each framework."""
