"""The job as frozen data that goes to JSON and back: job, environment, data references, plan."""
