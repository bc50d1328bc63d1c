"""Train a small transformer to sort digits, on the gradients of all workers, over Open MPI.

    paceline run train.py -j 1x2 --backend mpi -- --steps 200
    torchrun --nproc-per-node 2 train.py --backend gloo

Plain PyTorch: with `--backend mpi`, the one word "mpi" in `init_process_group` is all that differs from Gloo.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description="Train a small transformer to sort digits.")
parser.add_argument("--backend", default="mpi", help="mpi or gloo")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
args = parser.parse_args()

LENGTH, DIGITS, WIDTH = 8, 10, 64

dist.init_process_group(args.backend)
rank, world_size = dist.get_rank(), dist.get_world_size()


class Sorter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.digit(digits) + self.place))


torch.manual_seed(0)
model = DistributedDataParallel(Sorter())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(rank)  # other digits on each worker
begin = time.perf_counter()
for step in range(1, args.steps + 1):
    digits = torch.randint(0, DIGITS, (max(1, args.batch_size // world_size), LENGTH))
    loss = nn.functional.cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 or step == args.steps:
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {shown.item():.3f}, {step / (time.perf_counter() - begin):.0f} steps a second")
dist.destroy_process_group()
