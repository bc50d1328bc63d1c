"""Other libraries' trackers: what scripts log with them lands in the run, and what runs have logged goes out to them.

A script needs no change. In a worker, `hooks` waits until the script imports one of the libraries, and lets it tell its values
here as well; MLflow writes into the run through a store of its own kind (`paceline://`). A script that has none loads nothing.
"""
