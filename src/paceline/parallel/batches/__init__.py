"""Global batches: load them, cut them into microbatches, and compare them between ranks."""
