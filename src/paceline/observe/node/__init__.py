"""Programs and meters that run on a node beside the workers, with only Python's standard library."""
