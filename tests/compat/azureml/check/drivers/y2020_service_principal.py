"""What such a driver takes from the SDK; it is read, and never run."""

import os
from azureml.core import Workspace
from azureml.core.authentication import ServicePrincipalAuthentication, AzureCliAuthentication, MsiAuthentication

auth = ServicePrincipalAuthentication(
    tenant_id="t", service_principal_id="i", service_principal_password=os.environ["P"]
)
ws = Workspace(subscription_id="s", resource_group="g", workspace_name="w", auth=auth)
other = Workspace.get(name="w", auth=AzureCliAuthentication())
