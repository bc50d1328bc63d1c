"""Runners of models served without a script, one module for each framework."""
