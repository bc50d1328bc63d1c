"""Code that controllers of sweeps and pipelines share: their engine, reading a child, and retried requests."""
