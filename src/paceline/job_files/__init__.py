"""Job files and descriptions of jobs, for the command line, page and schedules."""
