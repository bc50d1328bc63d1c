"""Models that fill their parameters in ways of their own, and some that do what `empty()` refuses."""

from __future__ import annotations

import math

import torch
from torch import nn


class Built(nn.Module):
    """Ways in which models fill their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 40)
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.words.weight
        self.plain = nn.Linear(40, 40)
        self.cells = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.turn = nn.Parameter(torch.empty(6, 4))
        nn.init.orthogonal_(self.turn)
        self.cut = nn.Parameter(torch.empty(30, 40))
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.6, b=0.6)
        self.momentum = nn.Parameter(torch.empty(40, 40), requires_grad=False)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.register_buffer("table", torch.arange(6).float())
        self.apply(self.fill)
        for name, param in self.named_parameters():
            if name.endswith("plain.weight"):
                nn.init.normal_(param, std=0.02 / math.sqrt(4))
        self.momentum.data.copy_(self.plain.weight.data)
        with torch.no_grad():
            self.words.weight[3].zero_()

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.largest = float(self.up.weight.max())


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("first", torch.zeros(4, 4))
        self.first.copy_(self.up.weight.detach())


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2100, 2100))


class Never(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(4))
        with torch.no_grad():
            self.rows.mul_(2)
