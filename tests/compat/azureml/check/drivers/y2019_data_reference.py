"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.data.data_reference import DataReference
from azureml.core.runconfig import DataReferenceConfiguration, RunConfiguration
from azureml.core import ScriptRunConfig

ds = ws.get_default_datastore()
ref = DataReference(datastore=ds, data_reference_name="in", path_on_datastore="a", mode="download")
conf = DataReferenceConfiguration(datastore_name=ds.name, path_on_datastore="a", mode="download")
