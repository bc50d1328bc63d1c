"""Trackers of other libraries: import of their values, and export of metrics.

`hooks` waits for the libraries in a worker, `sink` collects the values, and `export` and `board` write for other programs.
MLflow has a store of its own kind (`paceline://`). Without trackers, a script loads none of this.
"""
