"""The ground floor: files, locks, links, processes, sizes and durations. Nothing here knows what a run is."""
