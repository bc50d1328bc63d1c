"""Find the cause of an attempt's failure from files and log lines that its processes have left."""
