"""Train a small convolutional network on handwritten digits with Horovod: every worker has a part of the images."""

import argparse
import socket

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32, help="rows of each worker in a step")
parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one worker")
parser.add_argument("--fail-on-rank", type=int, default=-1, help="let this rank fail, to see what is said of it")
args = parser.parse_args()

hvd.init()  # 1: meet the other workers
run = pl.Run.get_context()
print(f"rank {hvd.rank()} of {hvd.size()} on node {hvd.cross_rank()} ({socket.gethostname()})", flush=True)

data = np.load("digits.npz")
images, labels = torch.tensor(data["images"]).unsqueeze(1), torch.tensor(data["labels"])
train = TensorDataset(images[:1440], labels[:1440])
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())  # 2: other images on each worker
batches = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

torch.manual_seed(hvd.rank())  # other weights on each worker, on purpose: step 4 makes them the same
model = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, kernel_size=3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.lr * hvd.size(), momentum=0.9
)  # 3: a larger batch, larger steps
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 4: all begin with the weights of rank 0
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters()
)  # 5: the mean of all gradients

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in batches:
        if hvd.rank() == args.fail_on_rank:
            raise ValueError(f"label {int(y[0]) + 10} is not in 0..9")
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean().item()
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:  # 6: one worker speaks for all
        run.log("loss", mean, step=epoch)
        run.log("accuracy", right, step=epoch)
        print(f"epoch {epoch}: loss {mean:.4f}  accuracy {right:.4f} on {hvd.size()} workers", flush=True)

# Every worker says what its weights come to. If they differ, the workers have trained apart.
run.log("weights", sum(parameter.double().abs().sum().item() for parameter in model.parameters()))
if hvd.rank() == 0:
    torch.save(model.state_dict(), "outputs/model.pt")
