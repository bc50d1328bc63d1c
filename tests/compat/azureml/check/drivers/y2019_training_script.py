"""What such a driver takes from the SDK; it is read, and never run."""

import argparse
from azureml.core.run import Run
from azureml.core.model import Model
from sklearn.linear_model import Ridge

run = Run.get_context()
run.log("alpha", 0.1)
