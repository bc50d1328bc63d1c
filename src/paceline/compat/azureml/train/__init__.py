"""`azureml.train`."""
