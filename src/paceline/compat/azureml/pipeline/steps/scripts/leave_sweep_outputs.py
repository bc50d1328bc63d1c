"""A script that stores a sweep's results for later steps.

The results are the metrics of all trials as JSON, and files of the best trial.
"""

import argparse
import json
import os
import sys
from typing import Any

from paceline.compat.azureml.core.run import Run
from paceline.compat.azureml.pipeline.core.run import PipelineRun

parser = argparse.ArgumentParser()
parser.add_argument("--step", help="The sweep's step.")
parser.add_argument("--metrics", action="append", default=[], metavar="PATH")
parser.add_argument("--model", action="append", default=[], nargs=2, metavar=("PATH", "NAME"))
args = parser.parse_args()

run = Run.get_context()
sweep: Any
(sweep,) = PipelineRun(run.experiment, run.parent.id).find_step_run(args.step)

for path in args.metrics:
    # The columns of a data frame must be lists, so put each single value into a list.
    columns = {
        trial: {name: value if isinstance(value, list) else [value] for name, value in metrics.items()}
        for trial, metrics in sweep.get_metrics().items()
    }
    with open(path, "w") as file:
        json.dump(columns, file)

for path, wanted in args.model:
    best = sweep.get_best_run_by_primary_metric()
    if best is None:
        sys.exit(f"no trial of step {args.step!r} has logged the primary metric, so there is no best trial.")
    name = os.path.normpath(wanted or "outputs")
    names = best.get_file_names()
    if name in names:
        best.download_file(name, path)
        continue
    below = [one for one in names if one.startswith(f"{name}/")]
    if not below:
        sys.exit(f"{best.id}, the best trial of step {args.step!r}, has no file {name!r}; it has {', '.join(names)}.")
    for one in below:
        best.download_file(one, os.path.join(path, one[len(name) + 1 :]))
