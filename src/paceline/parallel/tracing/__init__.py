"""A model's outer forward (the code outside of its blocks) as a graph of calls, and where the graph can be cut."""
