"""Logistic regression in data parallelism: each worker reads the files of its own part, gradients are averaged."""

import argparse
import csv
import json
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="folder of CSV files; the last column is the label")
parser.add_argument("--out", type=Path, required=True, help="folder for the model")
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

dist.init_process_group("gloo")
run = pl.Run.get_context()
files = sorted(options.data.glob("*.csv"))
rows = torch.tensor([[float(cell) for cell in row] for file in files for row in csv.reader(file.open())])
print(f"{len(files)} files, {len(rows)} rows: {', '.join(file.name for file in files)}", flush=True)


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum over all workers."""
    dist.all_reduce(value)
    return value


# Sums over the workers, not averages of averages: parts need not be of one size.
count = total(torch.tensor(float(len(rows))))
mean = total(rows[:, :-1].sum(0)) / count
deviation = (total(((rows[:, :-1] - mean) ** 2).sum(0)) / count).sqrt()
x, y = (rows[:, :-1] - mean) / deviation, rows[:, -1]

weights = torch.zeros(x.shape[1] + 1, requires_grad=True)
optimizer = torch.optim.SGD([weights], lr=0.5)
for step in range(options.steps):
    logits = x @ weights[:-1] + weights[-1]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum") / count
    [gradient] = torch.autograd.grad(loss, [weights])
    weights.grad = total(gradient)
    optimizer.step()
    if step % 50 == 49 and dist.get_rank() == 0:
        run.log("step", step)

predicted = (x @ weights[:-1] + weights[-1] > 0).float()
table = total(torch.tensor([[((y == a) & (predicted == b)).sum() for b in (0, 1)] for a in (0, 1)]))
if dist.get_rank() == 0:
    accuracy = (table.trace() / table.sum()).item()
    run.log("accuracy", accuracy)
    named = [["malignant", *table[0].tolist()], ["benign", *table[1].tolist()]]
    print(tabulate(named, headers=["", "said malignant", "said benign"]), flush=True)
    print(f"accuracy {accuracy:.4f} on {int(count)} rows", flush=True)
    (options.out / "model.json").write_text(json.dumps({"weights": weights.tolist()}))
dist.destroy_process_group()
