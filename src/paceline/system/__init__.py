"""The lowest layer: files, locks, links, processes, sizes and durations. No module here knows what a run is."""
