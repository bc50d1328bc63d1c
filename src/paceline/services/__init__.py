"""Services, which serve models over HTTP: their records, and a process that keeps each service alive."""
