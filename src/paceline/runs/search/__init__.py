"""Find runs: the facts of each run, an index that keeps them fresh, and the query language over them."""
