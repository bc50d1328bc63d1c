"""What the controllers of sweeps and pipelines share: their engine, their view of a child, and retried requests."""
