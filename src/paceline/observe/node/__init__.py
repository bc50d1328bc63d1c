"""Programs and meters that run on a node beside the workers, with Python's standard library alone."""
