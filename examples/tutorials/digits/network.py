"""The network, in a file of its own: the training script and the service both need it."""

from torch import nn


def network(hidden: int) -> nn.Module:
    """Takes images [rows, 64] with values from 0 to 1; gives a number for each of the ten digits, the largest for its guess."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
