"""The global batch: which samples are in it, who loads them, and how it is cut into microbatches."""
