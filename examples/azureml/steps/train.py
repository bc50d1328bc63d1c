"""Fits a model to the first two thirds of the digits. The folder that it leaves it makes itself."""

import argparse
import os

import joblib
import numpy
from sklearn.linear_model import LogisticRegression

parser = argparse.ArgumentParser()
parser.add_argument("--input")
parser.add_argument("--penalty", type=float)
parser.add_argument("--output")
args = parser.parse_args()

images = numpy.load(os.path.join(args.input, "images.npy"))
labels = numpy.load(os.path.join(args.input, "labels.npy"))
cut = len(images) * 2 // 3
model = LogisticRegression(C=1 / args.penalty, max_iter=300).fit(images[:cut], labels[:cut])
os.makedirs(args.output)
joblib.dump(model, os.path.join(args.output, "model.pkl"))
