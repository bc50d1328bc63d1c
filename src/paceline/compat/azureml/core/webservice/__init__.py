"""`azureml.core.webservice`."""

from paceline.compat.azureml.core.webservice.webservice import (
    AciWebservice,
    AksEndpoint,
    AksWebservice,
    LocalWebservice,
    Webservice,
    WebserviceException,
)

__all__ = ["AciWebservice", "AksEndpoint", "AksWebservice", "LocalWebservice", "Webservice", "WebserviceException"]
