"""Data in a datastore, one part of its files for each of two workers, the model back into the store.

The data is scikit-learn's breast cancer set (569 rows), written to eight files of different size.
"""

import csv
import tempfile
from pathlib import Path

from sklearn.datasets import load_breast_cancer

import paceline as pl

ws = pl.Workspace.from_config()
store = ws.get_default_datastore()  # the workspace's folder `data`, until you register another

with tempfile.TemporaryDirectory() as folder:
    x, y = load_breast_cancer(return_X_y=True)
    start = 0
    for number in range(8):
        end = min(len(x), start + 40 + 9 * number)
        with open(Path(folder) / f"rows_{number}.csv", "w", newline="") as file:
            csv.writer(file).writerows([*row, label] for row, label in zip(x[start:end], y[start:end], strict=True))
        start = end
    store.upload(folder, "cancer", overwrite=True)

data = pl.Dataset.File.from_files((store, "cancer/*.csv")).register(ws, "cancer")
est = pl.PyTorch(
    source_directory=Path(__file__).parent,
    entry_script="train.py",
    script_params={
        "--data": data.as_named_input("cancer").as_partition(by="rank"),
        "--out": store.path("cancer-model").as_upload(overwrite=True),
    },
    pip_packages=["tabulate"],
    process_count_per_node=2,
    distributed_backend="gloo",
)
run = pl.Experiment(ws, "parts").submit(est)
run.wait_for_completion(show_output=True)
print(run.get_metrics("accuracy"), run.input_datasets["cancer"]["dataset"])
store.download(".", prefix="cancer-model", overwrite=True)  # ./cancer-model/model.json
