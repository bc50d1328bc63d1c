"""Global batches: their samples, their loading, and their cut into microbatches."""
