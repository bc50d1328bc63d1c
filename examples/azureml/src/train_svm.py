"""A support vector machine for the digits of scikit-learn, with the kernel and the penalty that it is given."""

import argparse
import os

import joblib
import numpy as np
from azureml.core.run import Run
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

parser = argparse.ArgumentParser()
parser.add_argument("--kernel", type=str, default="linear")
parser.add_argument("--penalty", type=float, default=1.0)
args = parser.parse_args()

run = Run.get_context()
run.log("Kernel type", np.str_(args.kernel))
run.log("Penalty", np.float64(args.penalty))

images, labels = load_digits(return_X_y=True)
train_images, test_images, train_labels, test_labels = train_test_split(images, labels, random_state=0)
svm = SVC(kernel=args.kernel, C=args.penalty, gamma="scale").fit(train_images, train_labels)
accuracy = svm.score(test_images, test_labels)
print(confusion_matrix(test_labels, svm.predict(test_images)))
run.log("Accuracy", accuracy)

os.makedirs("outputs", exist_ok=True)
joblib.dump(svm, "outputs/model.joblib")
