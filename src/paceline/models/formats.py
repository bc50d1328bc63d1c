"""What a file of a model is, told by its first bytes, its zip entries and its name. Nothing is loaded, and no pickle is read.

A pickle is a program that its reader runs: whoever may write one may do all that its reader may. So each file that holds one
is named (`HOLDS_PICKLE`).
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from paceline.models import safetensors

#: Formats whose readers run what is in them: a pickle, by itself or within an archive.
HOLDS_PICKLE = frozenset({"pickle", "torch", "joblib", "numpy-objects"})
#: Names for people.
TITLES = {
    "safetensors": "safetensors",
    "pickle": "pickle",
    "joblib": "joblib (pickle)",
    "torch": "torch.save (pickle)",
    "torchscript": "TorchScript",
    "torch-export": "torch.export",
    "onnx": "ONNX",
    "savedmodel": "TensorFlow SavedModel",
    "keras": "Keras",
    "hdf5": "HDF5",
    "tflite": "TensorFlow Lite",
    "gguf": "GGUF",
    "numpy": "NumPy",
    "numpy-objects": "NumPy objects (pickle)",
    "skops": "skops",
    "xgboost": "XGBoost",
    "lightgbm": "LightGBM",
}

_HEAD = 4096
_ENDINGS = {
    **dict.fromkeys((".pkl", ".pickle"), "pickle"),
    ".joblib": "joblib",
    # Without the zip of today's torch.save, these are the pickles of before 1.6.
    **dict.fromkeys((".pt", ".pth"), "torch"),
}
_UNPACKERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x78": lambda data: zlib.decompressobj().decompress(data, _HEAD),
    b"\x1f\x8b": lambda data: zlib.decompressobj(31).decompress(data, _HEAD),
    b"BZh": lambda data: bz2.BZ2Decompressor().decompress(data, _HEAD),
    b"\xfd7zXZ": lambda data: lzma.LZMADecompressor().decompress(data, _HEAD),
    b"\x5d\x00\x00": lambda data: lzma.LZMADecompressor().decompress(data, _HEAD),
}


def format_of(path: Path, name: str | None = None) -> str:
    """The format of a file, a key of `TITLES`; "" for one that is none of a model's. name: its own, where the path is another.

    Raises:
        OSError: it can't be read.
    """
    last = (name or os.fspath(path)).rpartition("/")[2].lower()
    ending = os.path.splitext(last)[1]
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _of_zip(path, ending)
    if last == "saved_model.pb":
        return "savedmodel"
    if found := _of_head(head, ending):
        return found
    if head[8:9] == b"{" and safetensors.header(path) is not None:
        return "safetensors"
    # A pickle of protocol 0 or 1 begins with no mark; its name is all that tells.
    return _ENDINGS.get(ending, "")


def _of_head(head: bytes, ending: str) -> str:
    if is_pickle(head):
        return {".joblib": "joblib", ".pt": "torch", ".pth": "torch"}.get(ending, "pickle")
    for magic, unpack in _UNPACKERS.items():
        if head.startswith(magic):
            with contextlib.suppress(zlib.error, OSError, lzma.LZMAError, ValueError):
                if is_pickle(unpack(head)):
                    return "joblib"
    if head.startswith(b"\x93NUMPY"):
        # Of arrays of objects, NumPy keeps a pickle.
        return "numpy-objects" if b"'descr': '|O'" in head[:256] else "numpy"
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "keras" if ending in (".keras", ".h5") else "hdf5"
    if head[4:8] == b"TFL3":
        return "tflite"
    if head.startswith(b"GGUF"):
        return "gguf"
    # Protobuf has no mark: field 1, a number, is the version of ONNX's representation.
    if ending == ".onnx" and head[:1] == b"\x08":
        return "onnx"
    if head.startswith(b"tree\nversion="):
        return "lightgbm"
    if head.lstrip().startswith((b'{"learner"', b"{L\x00\x00\x00\x00\x00\x00\x00\x07learner")):
        return "xgboost"
    return ""


def is_pickle(head: bytes) -> bool:
    """True if these first bytes are a pickle's, of protocol 2 or later: the mark of the protocol, then an opcode that may follow
    it.
    """
    return (
        len(head) > 2
        and head[0] == 0x80
        and 2 <= head[1] <= 5
        and head[2:3] in b"\x95\x8a}](c\x8cXKJGUC)NqMh\x80\x88\x89\x8e"
    )


def _of_zip(path: Path, ending: str) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if ending in (".npz", ""):
                objects = any(
                    name.endswith(".npy") and b"'descr': '|O'" in _start_of(archive, name) for name in names[:1000]
                )
                if objects:
                    return "numpy-objects"
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return _ENDINGS.get(ending, "")
    # torch puts all its entries below one folder, whose name is the file's.
    inner = {name.partition("/")[2] for name in names}
    if "data.pkl" in inner:
        return "torchscript" if any(name.startswith("code/") for name in inner) else "torch"
    if "archive_format" in inner or "serialized_exported_program.json" in names:
        return "torch-export"
    if "model.weights.h5" in names:
        return "keras"
    if "schema.json" in names:
        return "skops"
    if names and all(name.endswith(".npy") for name in names):
        return "numpy"
    return "pickle" if any(name.endswith((".pkl", ".pickle")) for name in names) else ""


def _start_of(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as entry:
        return entry.read(256)
