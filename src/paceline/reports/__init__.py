"""Reports about runs: comparisons, usage and bug reports."""
