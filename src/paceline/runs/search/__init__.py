"""Find runs: the facts of each run, their index, and the query language over them."""
