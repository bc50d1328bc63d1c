"""Common code of the controllers of sweeps and pipelines: engine, child records, retried requests."""
