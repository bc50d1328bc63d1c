"""Trains on scikit-learn's digits as a Horovod script does; nothing in it is Paceline's.

paceline run -j 1x2 --backend mpi examples/horovod_torch/train.py
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
dataset = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
batches = DataLoader(dataset, batch_size=arguments.batch_size, sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(128, 10),
)
scale = 1 if arguments.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * scale, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if arguments.use_adasum else hvd.Average,
)

for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = model(images[1500:]).argmax(1) == torch.tensor(digits.target[1500:])
    accuracy = hvd.allreduce(right.float().mean(), name="accuracy").item()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f} on {hvd.size()} ranks", flush=True)
