"""A small transformer, and the source of Python's standard library as characters to train it on."""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

MODULES = ("argparse", "ast", "configparser", "dataclasses", "datetime", "inspect", "tarfile", "textwrap", "typing")
#: Printable ASCII and the line's end; anything else is read as "?".
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class Source(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of `length` characters, each with the piece that begins one character later."""

    def __init__(self, length: int, pieces: int) -> None:
        texts = []
        for name in MODULES:
            path = os.path.join(os.path.dirname(os.__file__), f"{name}.py")
            if os.path.exists(path):  # some are folders in newer Pythons
                with open(path, encoding="utf-8") as file:
                    texts.append(file.read())
        number = {character: index for index, character in enumerate(CHARACTERS)}
        self.text = torch.tensor([number.get(character, number["?"]) for character in "".join(texts)])
        self.length = length
        self.pieces = pieces

    def __len__(self) -> int:
        return self.pieces

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * (len(self.text) - self.length - 1) // self.pieces
        piece = self.text[begin : begin + self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Numbers for the next character at each place; the embedding is tied to the head."""

    def __init__(self, length: int, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tok = nn.Embedding(len(CHARACTERS), width)
        self.pos = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)
        nn.init.normal_(self.tok.weight, std=0.1)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
