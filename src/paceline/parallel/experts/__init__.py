"""Experts of a mixture, some on each worker."""
