"""Datasets: files and tables with a fingerprint, registered by name and version."""
