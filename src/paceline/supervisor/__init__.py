"""The supervisor: prepares a run, launches and watches its workers, restarts them, and reports."""
