"""Train a transformer on the characters of Python's standard library, in one process.

    python chars_plain.py

Read it beside `chars_parallel.py`.
"""

import argparse

import torch
from chars import Source, Transformer, loss_of
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="Train a small transformer on the characters of Python's library.")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--pieces", type=int, default=640, help="in an epoch")
args = parser.parse_args()

loader = DataLoader(Source(length=64, pieces=args.pieces), batch_size=16, shuffle=True)
torch.manual_seed(0)
model = Transformer(length=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(args.epochs):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")
