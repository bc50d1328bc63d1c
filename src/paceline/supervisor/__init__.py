"""Beside the workers: prepares a run, launches it, watches it, restarts it where it should, and reports."""
