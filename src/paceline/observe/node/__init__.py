"""Standard-library programs that run on a node beside the workers, and meters of load."""
