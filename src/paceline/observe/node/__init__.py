"""Programs and meters that run on a node beside the workers; they need nothing but Python's standard library."""
