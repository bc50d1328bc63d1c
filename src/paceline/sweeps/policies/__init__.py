"""Policies: which trials are stopped early, judged by the curves of all. Pure functions: nothing here stops anything."""
