"""What such a driver takes from the SDK; it is read, and never run."""

import json
import os
from azureml.core.model import Model
from azureml.contrib.services.aml_request import AMLRequest, rawhttp
from azureml.contrib.services.aml_response import AMLResponse
from azureml.monitoring import ModelDataCollector


def init():
    global path
    path = Model.get_model_path("m")
