"""Leaves the digits of scikit-learn as two files."""

import argparse
import os

import numpy
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--output")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
numpy.save(os.path.join(args.output, "images.npy"), images / 16)
numpy.save(os.path.join(args.output, "labels.npy"), labels)
print(f"{len(images)} digits")
