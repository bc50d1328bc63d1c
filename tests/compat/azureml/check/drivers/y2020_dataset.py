"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core import Dataset, Datastore
from azureml.data import OutputFileDatasetConfig
from azureml.data.dataset_factory import DataType

store = Datastore.get(ws, "workspaceblobstore")
data = Dataset.File.from_files(path=(store, "d/**"))
table = Dataset.Tabular.from_delimited_files(path="https://h/t.csv", set_column_types={"a": DataType.to_float()})
found = Dataset.get_by_name(ws, "t")
out = OutputFileDatasetConfig(name="o", destination=(store, "o")).as_upload(overwrite=True)
