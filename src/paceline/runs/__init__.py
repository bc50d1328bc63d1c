"""Runs, which submissions leave: states, the run's folder, its record, metrics, files and logs, and the live handle."""
