"""A sweep shown while it goes on: a live table on a terminal or in a notebook, the controller's lines elsewhere."""
