"""A model's outer forward (the code outside of its blocks) as a graph that can be cut."""
