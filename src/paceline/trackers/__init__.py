"""Other experiment trackers: log their values as metrics, and export metrics to them.

In a worker, `hooks` acts when a tracker's library is imported, and `sink` collects the values. `export` and `board` write
metrics for other programs. `mlflow` lets MLflow use a workspace as its store. A script that uses no tracker loads only `hooks`.
"""
