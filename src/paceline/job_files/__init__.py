"""Job files and descriptions of jobs, as the command line, the page and schedules read them."""
