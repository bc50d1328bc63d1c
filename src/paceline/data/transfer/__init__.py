"""Transfer of files between stores and machines: list, fetch, cache and upload."""
