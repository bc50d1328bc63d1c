"""`azureml.pipeline`: graphs of steps, as `paceline.Pipeline` runs them."""
