"""The scoring script: the network, loaded once, and the labels of what each request brings."""

import json

import torch
from azureml.core.model import Model


def init():
    global model
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model.load_state_dict(torch.load(Model.get_model_path("digits")))


def run(raw_data):
    images = torch.tensor(json.loads(raw_data)["data"])
    with torch.no_grad():
        return json.dumps({"labels": model(images).argmax(1).tolist()})
