"""What went wrong in an attempt, told from what its processes have left."""
