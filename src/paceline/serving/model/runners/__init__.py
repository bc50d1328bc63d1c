"""Runners, which call models that are served without a script; one module for each framework."""
