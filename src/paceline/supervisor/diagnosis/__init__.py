"""Tells what went wrong in an attempt from what its processes have left."""
