"""Train a deep network on handwritten digits, spread over the workers as `--strategy` says."""

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

STRATEGIES = {
    "data": pl.DataParallel(),  # the whole model on each worker, a part of each batch
    "sharded": pl.FullyShard(),  # a part of each parameter, a part of each batch
    "pipeline": pl.PipelineParallel(),  # some of the layers, the whole batch in small pieces
    "tensor": pl.TensorParallel(),  # a part of single matrices, the whole batch
}

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", choices=STRATEGIES, default="data")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--sum", action="store_true", help="add up the loss of the rows, to see what is said of it")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="sum" if args.sum else "mean")


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


data = np.load("digits.npz")
images, labels = torch.tensor(data["images"]).flatten(1), torch.tensor(data["labels"])
loader = DataLoader(TensorDataset(images[:1440], labels[:1440]), batch_size=96, shuffle=True)  # of all workers together
test = DataLoader(TensorDataset(images[1440:], labels[1440:]), batch_size=357)

torch.manual_seed(0)  # the same model on every worker, before it is cut
model = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(6)), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
whole = sum(parameter.numel() for parameter in model.parameters())

par = pl.parallelize(
    model, optimizer, loader, loss=loss_of, strategy=STRATEGIES[args.strategy], microbatches=4, clip_norm=1.0
)
run = pl.Run.get_context()
for epoch in range(args.epochs):
    for batch in par.epoch(epoch):
        loss = par.step(batch)  # the mean over the whole batch, the same on every worker
        if par.rank == 0:
            run.log("loss", loss.item())
    right = par.evaluate(test, accuracy)
    if par.rank == 0:
        run.log("accuracy", right)
        print(
            f"epoch {epoch}: loss {loss.item():.6f}  accuracy {right:.4f} on {par.world_size} workers",
            flush=True,
        )

# What this worker holds of the model when no step is going on.
held = sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in par.module.parameters())
run.log("held", held / whole)
if par.rank == 0:
    print(par.explain())
par.save()  # into the run's folder of checkpoints, each worker its part
