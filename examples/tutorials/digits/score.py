"""Answer with the digits of the images that are asked for: {"data": [[64 numbers from 0 to 1], ...]}."""

import json
import os

import torch
from network import network


def init():  # once, when the service starts
    global model
    saved = torch.load(os.path.join(os.environ["PACELINE_MODEL_DIR"], "model", "model.pt"), weights_only=True)
    model = network(saved["hidden"])
    model.load_state_dict(saved["weights"])


def run(data):  # for each request
    images = torch.tensor(json.loads(data)["data"])
    with torch.no_grad():
        return model(images).argmax(1).tolist()
