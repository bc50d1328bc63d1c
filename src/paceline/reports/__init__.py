"""Reports made from the folders of runs: differences, usage, bug reports."""
