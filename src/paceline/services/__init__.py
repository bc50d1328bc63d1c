"""Models that answer requests: a record of each service, and a process that keeps it alive."""
