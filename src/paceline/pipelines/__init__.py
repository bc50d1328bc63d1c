"""Pipelines: graphs of ordinary runs, in which what one step leaves is what the next one finds."""
