"""The digits of scikit-learn, by a small network; on several ranks the gradients are averaged by Horovod."""

import argparse
import os

import horovod.torch as hvd
import torch
from azureml.core import Run
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--data_dir", help="Where a copy of the data is left.")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--learning_rate", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
run = Run.get_context()

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images[hvd.rank() :: hvd.size()] / 16, dtype=torch.float32)
labels = torch.tensor(labels[hvd.rank() :: hvd.size()])

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(args.epochs):
    for batch in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    right = (model(images).argmax(1) == labels).float().mean()
    accuracy = hvd.allreduce(right, name="accuracy").item()
    if hvd.rank() == 0:
        run.log("accuracy", accuracy)
        print(f"epoch {epoch}: accuracy {accuracy:.3f} on {hvd.size()} ranks")

if hvd.rank() == 0:
    os.makedirs("outputs", exist_ok=True)
    torch.save(model.state_dict(), "outputs/model.pt")
