"""Answer with the digits of the images that are asked for: {"data": [[64 numbers from 0 to 1], ...]}."""

import json
import os
import pickle
from pathlib import Path


def init():
    global model
    path = next(Path(os.environ["PACELINE_MODEL_DIR"]).rglob("model.pkl"))
    model = pickle.loads(path.read_bytes())


def run(data):
    return model.predict(json.loads(data)["data"]).tolist()
