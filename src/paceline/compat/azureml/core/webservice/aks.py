"""`azureml.core.webservice.aks`."""

from paceline.compat.azureml.core.webservice.webservice import AciWebservice, AksWebservice, LocalWebservice

__all__ = ["AciWebservice", "AksWebservice", "LocalWebservice"]
