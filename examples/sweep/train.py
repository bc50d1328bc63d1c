"""A script with hyperparameters: a small network on scikit-learn's digits. It logs `accuracy` after each epoch.

paceline sweep run examples/sweep/train.py --param 'lr=loguniform(1e-4, 1)' --param 'hidden=choice(8, 32, 128)' \\
    --metric accuracy --trials 12 --concurrent 4 --stop 'asha(first=2, eta=2)'
"""

import argparse

import numpy
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--epochs", type=int, default=8)
given = parser.parse_args()

digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(digits.data / 16, digits.target, random_state=0)
model = MLPClassifier((given.hidden,), solver="sgd", learning_rate_init=given.lr, random_state=0)
run = paceline.Run.get_context()
for epoch in range(given.epochs):
    model.partial_fit(train_x, train_y, classes=numpy.unique(digits.target))
    run.log("accuracy", model.score(test_x, test_y), step=epoch)
print(f"lr {given.lr:.5f}  hidden {given.hidden}  accuracy {model.score(test_x, test_y):.4f}")
