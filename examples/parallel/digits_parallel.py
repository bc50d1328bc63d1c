"""Train a small convolutional network on scikit-learn's handwritten digits, each worker with its part of every batch.

    python digits_parallel.py                                     one process
    torchrun --nproc-per-node 2 digits_parallel.py                two
    paceline run digits_parallel.py -j 1x2 --backend gloo         two, and a record of the run

Read it beside `digits_plain.py`: the model, the loader and the optimizer are the same.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel import DataParallel

parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's digits.")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
args = parser.parse_args()

# 1797 images of 8x8 pixels with values 0..16.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
parts = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
train, test = (TensorDataset(images[part], labels[part]) for part in parts)
train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(test, batch_size=args.batch_size)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
par = paceline.parallelize(model, optimizer, train_loader, loss=nn.functional.cross_entropy, strategy=DataParallel())


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


for epoch in range(args.epochs):
    for batch in par.epoch(epoch):
        loss = par.step(batch)
    right = par.evaluate(test_loader, accuracy)
    if par.rank == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.4f}")
