"""Detect file formats and frameworks from leading bytes, zip entries and names.

A pickle is a program that runs with its reader's rights. So Paceline never loads a pickle, and reports each file that contains
a pickle (`HOLDS_PICKLE`).
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.models.record import Lineage, ModelFile
from paceline.system.safetensors import TensorEntry, read_header

#: Formats that contain a pickle, alone or in an archive. Reading a file in such a format runs code from the pickle.
HOLDS_PICKLE = frozenset({"pickle", "torch", "joblib", "numpy-objects"})
#: Display name of each format.
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
    # Before torch 1.6, torch.save wrote a plain pickle instead of a zip file.
    **dict.fromkeys((".pt", ".pth"), "torch"),
}
_UNPACKERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x78": lambda data: zlib.decompressobj().decompress(data, _HEAD),
    b"\x1f\x8b": lambda data: zlib.decompressobj(31).decompress(data, _HEAD),
    b"BZh": lambda data: bz2.BZ2Decompressor().decompress(data, _HEAD),
    b"\xfd7zXZ": lambda data: lzma.LZMADecompressor().decompress(data, _HEAD),
    b"\x5d\x00\x00": lambda data: lzma.LZMADecompressor().decompress(data, _HEAD),
}

#: Format of a model's file -> framework that writes it.
_BY_FORMAT = {
    **dict.fromkeys(("torch", "torchscript", "torch-export"), "pytorch"),
    **dict.fromkeys(("savedmodel", "tflite"), "tensorflow"),
    "keras": "keras",
    "onnx": "onnx",
    "skops": "sklearn",
    "xgboost": "xgboost",
    "lightgbm": "lightgbm",
}
#: Framework -> names of its distributions; the first one that is installed is used.
_DISTRIBUTIONS = {
    "pytorch": ("torch",),
    "sklearn": ("scikit-learn",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
    "keras": ("keras", "tensorflow"),
    "onnx": ("onnx", "onnxruntime"),
    "xgboost": ("xgboost", "xgboost-cpu"),
    "lightgbm": ("lightgbm",),
}
#: (module name to search for in a pickle, framework): the first name that occurs in the pickle decides.
_MODULES = (
    (b"xgboost", "xgboost"),
    (b"lightgbm", "lightgbm"),
    (b"sklearn", "sklearn"),
    (b"torch", "pytorch"),
    (b"keras", "keras"),
)
_ONE_END = 1 << 20
# Matches the version in a scikit-learn estimator's pickle: a key, pickle's opcodes, the version's length, and the version.
_SKLEARN_VERSION = re.compile(
    rb"_sklearn_version(?:\x94|h.|q.|r....)*(?:\x8c(.)|X(.)\x00\x00\x00)([0-9][0-9A-Za-z.+]*)", re.S
)


def format_of(path: Path, name: str | None = None) -> str:
    """Return a file's format, such as "torch" (a key of `TITLES`); "" if unknown.

    name: the file's original name, if `path` has another name.

    Raises:
        OSError: The file can't be read.
    """
    last = (name or os.fspath(path)).rpartition("/")[2].lower()
    ending = os.path.splitext(last)[1]
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _of_zip(path, ending)
    if last == "saved_model.pb":
        return "savedmodel"
    if format_name := _of_head(head, ending):
        return format_name
    if head[8:9] == b"{" and header(path) is not None:
        return "safetensors"
    # A pickle of protocol 0 or 1 has no magic number, so only the file's name identifies it.
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
        # NumPy stores arrays of objects as a pickle.
        return "numpy-objects" if b"'descr': '|O'" in head[:256] else "numpy"
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "keras" if ending in (".keras", ".h5") else "hdf5"
    if head[4:8] == b"TFL3":
        return "tflite"
    if head.startswith(b"GGUF"):
        return "gguf"
    # Protobuf has no magic number. An ONNX file begins with field 1, the IR version.
    if ending == ".onnx" and head[:1] == b"\x08":
        return "onnx"
    if head.startswith(b"tree\nversion="):
        return "lightgbm"
    if head.lstrip().startswith((b'{"learner"', b"{L\x00\x00\x00\x00\x00\x00\x00\x07learner")):
        return "xgboost"
    return ""


def is_pickle(head: bytes) -> bool:
    """Return whether a file begins with a pickle of protocol 2 or later."""
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
    # torch puts all zip entries below one folder that is named after the file.
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


def framework_of(folder: Path, files: Sequence[ModelFile], run: Lineage) -> tuple[str | None, str | None]:
    """Return a model's framework and the framework's version, each None if unknown.

    Args:
        folder: The folder of the files.
        files: The model's files.
        run: The lineage of the run that made the model, or {}.
    """
    formats = {file.format for file in files}
    framework = next((_BY_FORMAT[name] for name in _BY_FORMAT if name in formats), None)
    version = None
    if framework is None:
        framework, version = _of_pickles(folder, files)
    if framework is None and formats & {"safetensors", "pickle", "joblib"}:
        # Files of several frameworks have this format, so use the framework that the run has recorded.
        framework = run.get("framework")
        if framework is None and "safetensors" in formats:
            framework = "pytorch" if _version("pytorch", run) else None
    return framework, version or (_version(framework, run) if framework else None)


def _of_pickles(folder: Path, files: Sequence[ModelFile]) -> tuple[str | None, str | None]:
    for file in files:
        if file.format in ("pickle", "joblib"):
            with open(folder / file.name, "rb") as opened:
                text = opened.read(_ONE_END)
                if file.size_bytes > 2 * _ONE_END:
                    opened.seek(-_ONE_END, 2)
                text += opened.read(_ONE_END)
            for module, framework in _MODULES:
                # Search the pickle for the name of a module of this framework, such as "sklearn.linear_model".
                if re.search(rb"[\x00-\x20]" + module + rb"[.\n\x94_]|c" + module + rb"[.\n]", text):
                    return framework, _sklearn_version(text) if framework == "sklearn" else None
    return None, None


def _sklearn_version(text: bytes) -> str | None:
    version = _SKLEARN_VERSION.search(text)
    if version is None:
        return None
    length = (version[1] or version[2])[0]
    return version[3][:length].decode("ascii")


def _version(framework: str, run: Lineage) -> str | None:
    environment = run.get("environment") or {}
    listed = [*(environment.get("packages") or ()), *(environment.get("pip") or ())]
    versions = {
        _canonical(name): version for name, _, version in (requirement.partition("==") for requirement in listed)
    }
    return next((versions[name] for name in _DISTRIBUTIONS.get(framework, (framework,)) if versions.get(name)), None)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a safetensors file, with its dtype as written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """The number of the tensor's elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The tensors of a safetensors file, sorted by name, and its metadata."""

    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """The number of elements of all tensors in the file."""
        return sum(tensor.parameters for tensor in self.tensors)


def header(path: Path) -> Header | None:
    """Return the header of a safetensors file, or None for other files.

    Raises:
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        try:
            entries, metadata, _, size = read_header(file)
            tensors = [_tensor(name, entry, size) for name, entry in sorted(entries.items())]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
    return Header(tensors=tuple(tensors), metadata={str(key): str(value) for key, value in metadata.items()})


def _tensor(name: str, entry: TensorEntry, size: int) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not (0 <= begin <= end <= size) or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(name)
    return Tensor(name=name, dtype=str(entry["dtype"]), shape=shape)
