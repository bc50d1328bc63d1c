"""A model's outer forward as a graph of calls, and the places where it can be cut."""
