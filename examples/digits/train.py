"""Train a small convolutional network on handwritten digits, in one process or in many.

    python train.py                                               one process
    torchrun --nproc-per-node 2 train.py                          two
    paceline run train.py -j 2x1 --backend mpi -- --epochs 5      two nodes, and a record of the run

Plain PyTorch: the workers find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, whoever sets them. Only
`run` is Paceline's; outside a run it prints what it is given.

digits.csv.gz is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI, 1998, CC BY 4.0,
https://doi.org/10.24432/C50P49), as scikit-learn has it: rows of 64 pixels from 0 to 16, and the digit.
"""

import argparse
import csv
import gzip
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="of all workers together")
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--gpu", action="store_true", help="one GPU for each worker, NCCL between them")
args = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if args.gpu else torch.device("cpu")
if args.gpu:
    torch.cuda.set_device(device)
if world_size > 1:
    dist.init_process_group("nccl" if args.gpu else "gloo")
run = paceline.Run.get_context()

# 1797 images of 8x8 pixels. The same split on every worker and for every seed.
with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
    rows = torch.tensor([[float(value) for value in row] for row in csv.reader(file)])
images, labels = rows[:, :-1].view(-1, 1, 8, 8) / 16, rows[:, -1].long()
order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
train, test = (TensorDataset(images[part], labels[part]) for part in (order[360:], order[:360]))

sampler = DistributedSampler(train, world_size, rank, seed=args.seed)
batches = DataLoader(train, batch_size=max(1, args.batch_size // world_size), sampler=sampler)
test_images, test_labels = (part.to(device) for part in test.tensors)

torch.manual_seed(args.seed)  # the same first weights on every worker
net = nn.Sequential(
    nn.Conv2d(1, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 10),
).to(device)
model = DistributedDataParallel(net) if world_size > 1 else net
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs)

history = []
for epoch in range(1, args.epochs + 1):
    sampler.set_epoch(epoch)
    start = time.perf_counter()
    loss_sum = torch.zeros((), device=device)
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * len(y)
    if world_size > 1:
        dist.all_reduce(loss_sum)
    schedule.step()
    seconds = time.perf_counter() - start

    with torch.no_grad():
        accuracy = (net(test_images).argmax(dim=1) == test_labels).double().mean().item()
    samples = len(sampler) * world_size
    result = {"loss": loss_sum.item() / samples, "accuracy": accuracy, "samples_per_s": samples / seconds}
    history.append(result)
    if rank == 0:
        for name, value in result.items():
            run.log(name, value)
        print(
            f"epoch {epoch}/{args.epochs}  loss {result['loss']:.4f}  accuracy {result['accuracy']:.4f}  "
            f"{result['samples_per_s']:,.0f} samples/s",
            flush=True,
        )

if rank == 0:
    os.makedirs("outputs", exist_ok=True)
    torch.save(net.state_dict(), "outputs/model.pt")
    with open("outputs/metrics.json", "w") as file:
        json.dump({"world_size": world_size, "epochs": history}, file, indent=1)
if world_size > 1:
    dist.barrier()  # nobody leaves while rank 0 still saves
    dist.destroy_process_group()
