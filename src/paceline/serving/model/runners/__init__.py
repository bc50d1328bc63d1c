"""Models that are served as they are, one module for each framework."""
