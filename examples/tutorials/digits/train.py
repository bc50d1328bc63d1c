"""Train a network on handwritten digits: 1797 images of 8x8 pixels, in the file beside this script."""

import argparse
import os

import numpy as np
import torch
from network import network
from torch.nn.functional import cross_entropy

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
parser.add_argument("--hidden", type=int, default=32, help="units of the hidden layer")
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

data = np.load("digits.npz")
images, labels = torch.tensor(data["images"]), torch.tensor(data["labels"])
train_x, train_y = images[:1440], labels[:1440]
test_x, test_y = images[1440:], labels[1440:]  # written by other people

torch.manual_seed(0)
model = network(args.hidden)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
run = pl.Run.get_context()  # the run that this script is part of

for epoch in range(args.epochs):
    total = 0.0
    for rows in torch.randperm(len(train_x)).split(32):
        loss = cross_entropy(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    run.log("loss", total / len(train_x), step=epoch)
    run.log("accuracy", accuracy, step=epoch)
    print(f"epoch {epoch}: loss {total / len(train_x):.4f}  accuracy {accuracy:.4f}", flush=True)

os.makedirs("outputs/model", exist_ok=True)  # what lies in ./outputs stays with the run
torch.save({"hidden": args.hidden, "weights": model.state_dict()}, "outputs/model/model.pt")
