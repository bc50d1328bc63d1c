"""Train a transformer on the characters of Python's standard library, spread over the workers as you choose.

    python chars_parallel.py                                                        one process
    torchrun --nproc-per-node 2 chars_parallel.py --strategy pipeline               two stages
    paceline run chars_parallel.py -j 1x2 --backend gloo -- --strategy tensor       each layer in two parts, and a record
    paceline run chars_parallel.py -j 1x4 --backend gloo -- --strategy data-pipeline   two replicas of two stages

Read it beside `chars_plain.py`. In a run of Paceline a restart goes on from the last checkpoint, with any strategy.
"""

import argparse
import os

import torch
from chars import Source, Transformer, loss_of
from torch.utils.data import DataLoader

import paceline
from paceline.parallel import DataParallel, FullyShard, PipelineParallel, TensorParallel

STRATEGIES = {
    "data": DataParallel(),
    "pipeline": PipelineParallel(),
    "tensor": TensorParallel(),
    "fully-sharded": FullyShard(),
    "data-pipeline": DataParallel() @ PipelineParallel(stages=2),
}

parser = argparse.ArgumentParser(description="Train a small transformer on the characters of Python's library.")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--pieces", type=int, default=640, help="in an epoch")
parser.add_argument("--strategy", choices=STRATEGIES, default="data")
args = parser.parse_args()

loader = DataLoader(Source(length=64, pieces=args.pieces), batch_size=16, shuffle=True)
torch.manual_seed(0)
model = Transformer(length=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
par = paceline.parallelize(
    model, optimizer, loader, loss=loss_of, strategy=STRATEGIES[args.strategy], microbatches=4, clip_norm=1.0
)
keeps = "PACELINE_CHECKPOINT_DIR" in os.environ
if keeps:
    par.load()

for epoch in range(par.progress.epoch, args.epochs):
    total = 0.0
    for batch in par.epoch(epoch):
        total += par.step(batch).item()
    if par.rank == 0:
        print(f"epoch {epoch}: loss {total / len(par):.4f}")
    if keeps:
        par.save()
