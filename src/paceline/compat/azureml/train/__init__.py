"""`azureml.train`: estimators and hyperparameter tuning."""
