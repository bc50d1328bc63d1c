"""Safetensors in Hugging Face's layout, read in parts and written tensor by tensor.

    model.safetensors                   or: model-00001-of-00003.safetensors ... and model.safetensors.index.json
    a file: see `paceline.system.safetensors`
    index: {"metadata": {"total_size": bytes}, "weight_map": {name: file}}

See https://github.com/huggingface/safetensors#format. The safetensors library writes a whole file from tensors in
memory, but a worker of a large model lacks the memory for all tensors of a file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from paceline.checkpoint.values import TYPES
from paceline.parallel.errors import ParallelError
from paceline.parallel.large.meta_parameters import Region
from paceline.system.safetensors import TensorEntry, fill, header, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, (own, _) in TYPES.items() if hasattr(torch, own)}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class Folder:
    """A reader of the safetensors in a folder, or in one file.

    Raises:
        ParallelError: There are no safetensors, or a file is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, tuple[Path, int, TensorEntry]] = {}
        #: How many bytes have been read from the files so far. The files' headers don't count.
        self.bytes_read = 0
        for file in self._files():
            start, entries = _entries(file)
            self._entries |= {name: (file, start, entry) for name, entry in entries.items()}

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def find(self, names: Iterable[str]) -> str | None:
        """Return the first of these names that a file contains, or None."""
        return next((name for name in names if name in self._entries), None)

    def check(self, name: str, shape: tuple[int, ...], wanted: str) -> None:
        """Refuse a stored tensor that does not fit the model.

        Args:
            name: The stored tensor's name.
            shape: The shape of the model's tensor.
            wanted: The name of the model's tensor, for the error.

        Raises:
            ParallelError: The tensor has another shape, or a dtype that torch lacks.
        """
        file, _, entry = self._entries[name]
        if tuple(entry["shape"]) != shape:
            raise ParallelError(
                f"{file}: {name!r} has the shape {entry['shape']}, and the model's {wanted!r} {list(shape)}. Build the model "
                "with the configuration that the weights were saved with."
            )
        if entry["dtype"] not in _TYPES:
            raise ParallelError(f"{file}: {name!r} has the type {entry['dtype']}, which can't be read here.")

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Read a stored tensor, or only the part of it in `region`."""
        file, start, entry = self._entries[name]
        shape, dtype = tuple(entry["shape"]), _TYPES[entry["dtype"]]
        region = region or tuple((0, size) for size in shape)
        if not math.prod(end - begin for begin, end in region):
            return torch.empty([end - begin for begin, end in region], dtype=dtype, device="cpu")
        row = math.prod(shape[1:]) * dtype.itemsize
        first, last = region[0] if region else (0, 1)
        with file.open("rb") as opened:
            opened.seek(start + entry["data_offsets"][0] + first * row)
            if all(span == (0, size) for span, size in zip(region[1:], shape[1:], strict=True)):
                data = self._bytes(opened, (last - first) * row)
                return data.view(dtype).reshape([end - begin for begin, end in region])
            # If the region has only some of the columns, read the bytes of each row separately.
            (begin, end), *deeper = region[1:]
            inner = (slice(None), *(slice(*span) for span in deeper))
            item = math.prod(shape[2:]) * dtype.itemsize
            tensor = torch.empty([stop - at for at, stop in region], dtype=dtype, device="cpu")
            for index in range(first, last):
                opened.seek(start + entry["data_offsets"][0] + index * row + begin * item)
                columns = self._bytes(opened, (end - begin) * item).view(dtype).reshape(end - begin, *shape[2:])
                tensor[index - first] = columns[inner]
            return tensor

    def _bytes(self, opened: BinaryIO, count: int) -> Tensor:
        data = torch.empty(count, dtype=torch.uint8, device="cpu")
        if not fill(opened, data.numpy()):
            raise ParallelError(f"{opened.name} ends in the middle of a tensor. Copy it again.")
        self.bytes_read += count
        return data

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        index = self.path / INDEX
        if index.is_file():
            try:
                files = sorted({str(file) for file in json.loads(index.read_text())["weight_map"].values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ParallelError(f"{index} is not an index of safetensors: {error!r}.") from error
            for file in files:
                # The index may come from an untrusted source, so it may only name files in its own folder.
                if Path(file).name != file:
                    raise ParallelError(f"{index} names {file!r}, which is not a file beside it.")
                if not (self.path / file).is_file():
                    raise ParallelError(f"{index} names {file!r}, which is not there. Copy all files of the folder.")
            return [self.path / file for file in files]
        if (self.path / SINGLE).is_file():
            return [self.path / SINGLE]
        raise ParallelError(
            f"weights={str(self.path)!r}: there is neither {INDEX} nor {SINGLE}. Give a folder of safetensors, such as "
            "save_pretrained() or par.save_safetensors() writes, or one file of them, which every worker can read."
        )


def _entries(file: Path) -> tuple[int, dict[str, TensorEntry]]:
    with file.open("rb") as opened:
        try:
            entries, _, start, size = read_header(opened)
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                dtype = _TYPES.get(entry["dtype"])
                whole = end - begin if dtype is None else math.prod(entry["shape"]) * dtype.itemsize
                if not 0 <= begin <= end <= size or end - begin != whole:
                    raise ValueError(f"{name} spans bytes {begin} to {end}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParallelError(f"{file} is not a file of safetensors: {error}.") from error
    return start, entries


class Writer:
    """A writer of a safetensors file, tensor by tensor.

    `tensors` has the name, shape and dtype of each tensor, in the order of writing.
    """

    def __init__(self, path: Path, tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        about = [
            (name, type_name(name, dtype), shape, math.prod(shape) * dtype.itemsize) for name, shape, dtype in tensors
        ]
        self._file = path.open("xb")
        self._file.write(header(about, {"format": "pt"}))

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, which must be on the CPU."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if sys.byteorder == "big":
            raise ParallelError("safetensors are written in little endian, which this machine is not.")
        self._file.write(data.numpy().data)

    def close(self) -> None:
        """Flush the file to the disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def type_name(name: str, dtype: torch.dtype) -> str:
    """Return the name of `dtype` in safetensors files, or raise ParallelError."""
    if dtype not in _NAMES:
        raise ParallelError(f"{name} has the dtype {dtype}, which safetensors lack; par.save() supports every dtype.")
    return _NAMES[dtype]
