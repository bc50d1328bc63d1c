"""The lowest layer: files, locks, links, processes, sizes and durations."""
