"""Distribution of samples over ranks."""
