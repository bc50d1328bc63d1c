"""Services, which serve models over HTTP: their records, and a supervisor for each that keeps it alive."""
