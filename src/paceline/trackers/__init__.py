"""Other experiment trackers: log their values as metrics, and export metrics to them.

In a worker, `hooks` waits for the trackers' libraries, and `sink` collects the values. `export` and `board` write metrics for
other programs. `mlflow` has MLflow's stores over a workspace. A script that uses no tracker loads only `hooks`.
"""
