"""Define the job as frozen data that is converted to JSON and back: job, environment, data references, plan."""
