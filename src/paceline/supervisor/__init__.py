"""The supervisor of a run, which prepares it, launches and watches its workers, restarts them, and reports."""
