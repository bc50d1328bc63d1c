"""Train a network on a folder of images: on a laptop, on several workers, on several machines, and again after a crash."""

import argparse
import os
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="folder of .npz files with `images` and `labels`")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
parser.add_argument("--crash-in", type=int, default=-1, help="let the last worker crash in this epoch, the first time")
args = parser.parse_args()

# A launcher tells each worker its rank. Without one the world has one worker.
rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if workers > 1:
    dist.init_process_group("gloo")
run = pl.Run.get_context()

parts = [np.load(path) for path in sorted(args.data.glob("*.npz"))]
images = torch.tensor(np.concatenate([part["images"] for part in parts]), dtype=torch.float32)
labels = torch.tensor(np.concatenate([part["labels"] for part in parts]))
end = int(0.8 * len(images))
train = TensorDataset(images[:end], labels[:end])
sampler = DistributedSampler(train, workers, rank)  # other rows on each worker
batches = DataLoader(train, batch_size=args.batch_size // workers, sampler=sampler)

torch.manual_seed(0)  # the same first weights on each worker
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.003)

# In a run, the same folder in each attempt. Beside its name and then renamed, so that a crash leaves no half checkpoint.
checkpoint = Path(os.environ.get("PACELINE_CHECKPOINT_DIR", "."), "last.pt")
# Rank 0 reads it and tells the others: where machines share no folder, theirs may have none.
saved = [torch.load(checkpoint, weights_only=True) if rank == 0 and checkpoint.exists() else None]
if workers > 1:
    dist.broadcast_object_list(saved)
first = 0
if saved[0] is not None:
    net.load_state_dict(saved[0]["net"])
    optimizer.load_state_dict(saved[0]["optimizer"])
    first = saved[0]["epoch"] + 1
    print(f"goes on with epoch {first}", flush=True)
model = DistributedDataParallel(net) if workers > 1 else net

for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch == args.crash_in and os.environ.get("PACELINE_ATTEMPT") == "1" and rank == workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as if its machine had lost power
    if workers > 1:
        dist.barrier()  # all have come so far
    if rank == 0:
        with torch.no_grad():
            accuracy = (net(images[end:]).argmax(1) == labels[end:]).double().mean().item()
        run.log("loss", loss.item(), step=epoch)
        run.log("accuracy", accuracy, step=epoch)
        print(f"epoch {epoch}: loss {loss.item():.4f}  accuracy {accuracy:.4f} on {workers} workers", flush=True)
        state = {"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

if rank == 0:
    os.makedirs("outputs", exist_ok=True)
    torch.save(net.state_dict(), "outputs/model.pt")
if workers > 1:
    dist.destroy_process_group()
