"""Train a classifier of handwritten digits and leave it in outputs/model."""

import argparse
import pickle
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--C", type=float, default=1.0)
args = parser.parse_args()

run = pl.Run.get_context()
pixels, digits = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(pixels / 16, digits, random_state=0)
model = LogisticRegression(C=args.C, max_iter=200).fit(train_x, train_y)
run.log("accuracy", model.score(test_x, test_y))

folder = Path("outputs/model")
folder.mkdir(parents=True, exist_ok=True)
(folder / "model.pkl").write_bytes(pickle.dumps(model))
