"""Which worker gets which samples, in which order."""
