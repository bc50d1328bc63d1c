"""Programs that run on a node beside the workers, and meters of load. They need only the standard library."""
