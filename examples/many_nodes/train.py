"""Train a transformer on characters, on as many nodes as there are: data from the node's disk, checkpoints on a shared folder.

    python train.py --data SHARDS --checkpoints FOLDER                       one process
    paceline run train.py -j 2x4 --backend gloo -- --data ... --checkpoints ...   8 workers on 2 nodes

It goes on from the newest checkpoint of the folder, whoever wrote it: an earlier attempt of this run, or another run with
more nodes or fewer. `submit.py` is what starts it on a cluster.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="folder of .npy files, each with characters as bytes")
parser.add_argument("--checkpoints", type=Path, required=True, help="folder that all nodes see")
parser.add_argument("--steps", type=int, default=200, help="in all, those of former attempts included")
parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
parser.add_argument("--batch-size", type=int, default=32, help="of all workers together")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--length", type=int, default=64, help="characters of a row")
parser.add_argument(
    "--shard", type=int, default=0, help="workers that share one copy of the model; 0: each has a whole one"
)
args = parser.parse_args()


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the shards, which are mapped from the disk and not read: all workers of a node have them in memory once."""

    def __init__(self, folder: Path, length: int) -> None:
        self.shards = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]
        self.length = length
        self.first = np.cumsum([0] + [(len(shard) - 1) // length for shard in self.shards])

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        begin = (index - int(self.first[number])) * self.length
        piece = torch.from_numpy(self.shards[number][begin : begin + self.length + 1].astype(np.int64))
        return piece[:-1], piece[1:]


class Transformer(nn.Module):
    def __init__(self, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


torch.manual_seed(0)
model = Transformer(args.length, args.width, args.depth)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Characters(args.data, args.length), batch_size=args.batch_size, shuffle=True, drop_last=True)
strategy = pl.DataParallel() @ pl.FullyShard(args.shard) if args.shard else pl.DataParallel()
par = pl.parallelize(model, optimizer, loader, loss=loss_of, strategy=strategy)
run = pl.Run.get_context()


def save() -> None:
    """Write a checkpoint while the training goes on, and remove those that are too old."""
    before = time.perf_counter()
    par.save(asynchronous=True)
    if par.rank == 0:
        run.log("save_s", time.perf_counter() - before, step=par.progress.steps)  # how long the training stood still
        # A folder has such a name only once the checkpoint is complete.
        done = sorted((int(path.name[5:]), path) for path in args.checkpoints.glob("step_*"))
        for _, path in done[: -args.keep]:
            shutil.rmtree(path, ignore_errors=True)


# Where par.save() and par.load() look. In a run the variable names a folder of that run; this one outlives it.
os.environ["PACELINE_CHECKPOINT_DIR"] = str(args.checkpoints.resolve())
par.load()
if par.rank == 0:
    print(f"{par.world_size} workers begin with step {par.progress.steps} of {args.steps}", flush=True)

saved_at = par.progress.steps
while par.progress.steps < args.steps:
    before, begin = time.perf_counter(), par.progress.steps
    for batch in par.epoch(par.progress.epoch):
        loss = par.step(batch)
        steps = par.progress.steps
        if steps % 10 == 0 and par.rank == 0:
            # One row for all workers, each ten steps: metrics cost nothing then, with however many workers.
            seconds = (time.perf_counter() - before) / (steps - begin)
            run.log("loss", loss.item(), step=steps)
            run.log("step_s", seconds, step=steps)
            run.log("rows_per_s", args.batch_size / seconds, step=steps)
            print(f"step {steps}: loss {loss.item():.3f}  {1000 * seconds:.0f} ms", flush=True)
        if steps - saved_at >= args.save_every or steps >= args.steps:
            save()
            saved_at = steps
        if steps >= args.steps:
            break
par.wait()  # until the last checkpoint is written
if par.rank == 0:
    print(f"done: {args.steps} steps, loss {loss.item():.3f}", flush=True)
