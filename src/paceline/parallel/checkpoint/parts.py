"""The parts of a checkpoint: one file per rank, with the tensors or pieces of tensors that the rank writes.

    part_0_of_4.safetensors     rank 0's pieces

A piece is a box (a range in each dimension) of the whole tensor. If several ranks hold copies of a box, the rank with
the fewest bytes to write writes it. A file's header has each whole tensor's shape and dtype, and each box's first
index. So any layout can read the boxes that it needs. torch's `HuggingFaceStorageReader` reads the files too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.api import CheckpointFile, DenseArray, is_storable, unreadable
from paceline.parallel.errors import CheckpointError
from paceline.parallel.full_tensor import is_part
from paceline.parallel.reduce import local

_PART = re.compile(r"part_(\d+)_of_(\d+)\.safetensors")
#: The key in a checkpoint file's metadata where torch's reader looks for the first index of each piece of a tensor.
_TORCHS = "DCP_SHARDING_INFO"

#: A piece of a tensor: the tensor's key, the first index and the shape of the piece, and its number of bytes.
Box = tuple[str, tuple[int, ...], tuple[int, ...], int]

#: Key of a whole tensor -> its shape and dtype.
Shapes = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class TensorPiece:
    """One rank's box (a range in each dimension) of a whole tensor.

    `corner` is the index of the box's first element in the whole tensor.
    """

    key: str
    corner: tuple[int, ...]
    tensor: Tensor
    whole: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.key, self.corner, tuple(self.tensor.shape), self.tensor.nbytes


def pieces_of(tensors: Mapping[str, Tensor]) -> list[TensorPiece]:
    """Return this rank's non-empty pieces of the tensors, without a copy."""
    pieces = [
        TensorPiece(key, corner_of(tensor), local(tensor), tuple(tensor.shape)) for key, tensor in tensors.items()
    ]
    return [piece for piece in pieces if piece.tensor.numel() or not math.prod(piece.whole)]


def corner_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the index of this rank's first element in the whole tensor."""
    from paceline.torch_private import corner_of_part

    return corner_of_part(tensor) if is_part(tensor) else (0,) * tensor.dim()


def writers(boxes: Sequence[Sequence[Box]]) -> dict[Box, int]:
    """Choose the rank that writes each box, and balance the ranks' bytes.

    `boxes` has one list for each rank: the boxes (parts of tensors) that the rank holds.
    """
    holders: dict[Box, list[int]] = {}
    for rank, of_rank in enumerate(boxes):
        for box in of_rank:
            holders.setdefault(box, []).append(rank)
    loads = [0] * len(boxes)
    chosen: dict[Box, int] = {}
    # Assign large pieces first. The small pieces can then even out how many bytes each rank writes.
    for box, ranks in sorted(holders.items(), key=lambda item: (-item[0][3], item[0])):
        chosen[box] = min(ranks, key=lambda rank: loads[rank])
        loads[chosen[box]] += box[3]
    return chosen


def part_name(rank: int, size: int) -> str:
    return f"part_{rank}_of_{size}.safetensors"


def encoded(pieces: Sequence[TensorPiece]) -> tuple[object, list[DenseArray], dict[str, str]]:
    """Convert tensor pieces to the header, arrays and torch metadata of a file."""
    about = {
        piece.key: [list(piece.whole), list(piece.corner), list(piece.tensor.shape), str(piece.tensor.dtype)]
        for piece in pieces
    }
    arrays = [DenseArray(piece.key, _storable(piece.tensor)) for piece in pieces]
    corners = {piece.key: {"saved_offsets": list(piece.corner)} for piece in pieces}
    return about, arrays, {_TORCHS: json.dumps(corners)}


def _storable(tensor: Tensor) -> Tensor:
    return tensor if is_storable(tensor) else tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class SavedParts:
    """The parts of a saved checkpoint.

    Args:
        folder: The checkpoint's folder.
        paths: Paths of the parts by rank; empty if the parts are in the folder.

    Attributes:
        files: The file of each part.
        about: Key -> shape and dtype of each whole tensor.

    Raises:
        CheckpointError: A part is missing or damaged.
    """

    def __init__(self, folder: Path, paths: Sequence[Path] = ()) -> None:
        self._folder = folder
        self.files = [CheckpointFile(path, folder) for path in paths or self._find(folder)]
        self.about: Shapes = {}
        self._boxes: dict[str, list[tuple[CheckpointFile, list[int], list[int]]]] = {}
        for file in self.files:
            try:
                for key, (whole, corner, shape, dtype) in file.state.items():
                    self.about[key] = torch.Size(whole), _dtype(dtype)
                    self._boxes.setdefault(key, []).append((file, list(map(int, corner)), list(map(int, shape))))
            except (AttributeError, TypeError, ValueError) as error:
                raise CheckpointError(unreadable(folder, f"{file.path.name} says what no save() writes")) from error

    @staticmethod
    def _find(folder: Path) -> list[Path]:
        names = {match[0]: match for path in folder.iterdir() if (match := _PART.fullmatch(path.name))}
        sizes = {int(match[2]) for match in names.values()}
        if len(sizes) != 1 or len(names) != min(sizes):
            raise CheckpointError(
                unreadable(folder, f"it has {len(names)} parts, and they are of {sorted(sizes)} ranks")
            )
        return [folder / name for name in sorted(names)]

    def read_into(self, buffers: Mapping[str, Tensor]) -> None:
        """Fill each buffer, or this rank's part of it, with saved values.

        `buffers` maps a tensor's key in the checkpoint to its buffer.

        Raises:
            CheckpointError: Values are missing, or a file is damaged.
        """
        for key, buffer in buffers.items():
            target, corner = local(buffer), corner_of(buffer)
            left = target.numel()
            for file, saved_corner, shape in self._boxes.get(key, ()):
                begins = [max(a, b) for a, b in zip(corner, saved_corner, strict=True)]
                ends = [min(a + n, b + m) for a, n, b, m in zip(corner, target.shape, saved_corner, shape, strict=True)]
                if any(begin >= end for begin, end in zip(begins, ends, strict=True)) or not left:
                    continue
                there = self._array(file, key, shape)[_slices(begins, ends, saved_corner)]
                target[_slices(begins, ends, corner)].copy_(there)
                left -= there.numel()
            if left:
                raise CheckpointError(unreadable(self._folder, f"it lacks {left} values of {key!r}"))

    def _array(self, file: CheckpointFile, key: str, shape: list[int]) -> Tensor:
        array = file.array(key, "torch")
        assert isinstance(array, Tensor)
        dtype = self.about[key][1]
        return array if array.dtype == dtype else array.view(dtype).reshape(shape)


def _slices(begins: Sequence[int], ends: Sequence[int], corner: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, corner, strict=True))


def _dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a type of torch")
    return dtype
