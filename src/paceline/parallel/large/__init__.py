"""Models that no worker holds whole: made without values, cut, and only then filled. Loaded on use: imports torch."""
