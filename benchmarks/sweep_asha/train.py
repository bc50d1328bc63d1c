"""A small convolutional network on scikit-learn's digits, with a checkpoint after each epoch."""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=81)
parser.add_argument("--lr", type=float)
parser.add_argument("--momentum", type=float)
parser.add_argument("--batch", type=int)
parser.add_argument("--width", type=int)
parser.add_argument("--dropout", type=float)
parser.add_argument("--decay", type=float)
given = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(data.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1200], order[1200:]

model = nn.Sequential(
    *(nn.Conv2d(1, given.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(given.width, 2 * given.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Dropout(given.dropout), nn.Linear(8 * given.width, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=given.momentum, weight_decay=given.decay)

path = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], "last.pt")
first = 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]

run = paceline.Run.get_context()
for epoch in range(first, given.epochs):
    # By the epoch, so that one that goes on draws what an unbroken one does.
    torch.manual_seed(epoch)
    model.train()
    for batch in train[torch.randperm(len(train))].split(given.batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images[test]), labels[test]).item()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, f"{path}.new")
    os.replace(f"{path}.new", path)
    run.log("loss", loss, step=epoch)
