"""One rank fails, and all say why."""
