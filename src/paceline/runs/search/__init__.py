"""Find runs: an index of their states, parameters and metrics, and a query language over it."""
