"""Code that controllers of sweeps and pipelines share: engine, child records, retried requests."""
