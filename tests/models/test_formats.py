"""The recognized format of files of libraries, and that no pickle is ever loaded."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import warnings
import zipfile
import zlib

import pytest

from paceline.models import registry, sources
from paceline.models.formats import HOLDS_PICKLE, TITLES, Tensor, format_of, framework_of, header
from paceline.models.record import ModelFile
from tests.helpers import write_tree
from tests.late import late

torch, numpy, joblib = late("torch"), late("numpy"), late("joblib")


class Bomb:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def safetensors_file(tensors, metadata=None, data=b"", cut=0):
    text = json.dumps({**({"__metadata__": metadata} if metadata else {}), **tensors}).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    return whole[: len(whole) - cut]


def zip_of(*names, content=b""):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            # Use ZipInfo for a fixed time, because the bytes are part of test ids, which must be the same in each pytest process.
            archive.writestr(zipfile.ZipInfo(name), content)
    return data.getvalue()


ARRAY = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }"
OBJECTS = ARRAY.replace(b"'<f8'", b"'|O'")
PICKLE = pickle.dumps({"a": [1, 2]})


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        *[("model.pkl", pickle.dumps({"a": 1}, protocol), "pickle") for protocol in range(6)],
        *[("model.dat", pickle.dumps([], protocol), "pickle") for protocol in range(2, 6)],
        ("model.pt", PICKLE, "torch"),
        ("model.joblib", PICKLE, "joblib"),
        ("model", zlib.compress(PICKLE), "joblib"),
        ("model.gz", gzip.compress(PICKLE, mtime=0), "joblib"),
        ("model.bz2", bz2.compress(PICKLE), "joblib"),
        ("model.xz", lzma.compress(PICKLE), "joblib"),
        ("model.lzma", lzma.compress(PICKLE, lzma.FORMAT_ALONE), "joblib"),
        ("text.gz", gzip.compress(b"some text", mtime=0), ""),
        ("torn.gz", b"\x1f\x8btorn", ""),
        ("a.npy", ARRAY, "numpy"),
        ("a.npy", OBJECTS, "numpy-objects"),
        ("a.npz", zip_of("a.npy", content=ARRAY), "numpy"),
        ("a.npz", zip_of("a.npy", content=OBJECTS), "numpy-objects"),
        ("model.h5", b"\x89HDF\r\n\x1a\n", "keras"),
        ("data.hdf5", b"\x89HDF\r\n\x1a\n", "hdf5"),
        ("m.keras", zip_of("config.json", "metadata.json", "model.weights.h5"), "keras"),
        ("m.skops", zip_of("schema.json"), "skops"),
        ("any.zip", zip_of("a.txt", "b.pickle"), "pickle"),
        ("any.zip", zip_of("a.txt"), ""),
        ("torn.pt", b"PK\x03\x04 and no more", "torch"),
        ("saved_model.pb", b"\x08\x01", "savedmodel"),
        ("m.onnx", b"\x08\x08\x12\x07pytorch", "onnx"),
        ("m.tflite", b"\x1c\x00\x00\x00TFL3", "tflite"),
        ("m.gguf", b"GGUF\x03", "gguf"),
        ("m.txt", b"tree\nversion=v4\n", "lightgbm"),
        ("m.json", b'{"learner":{"attributes":{}}}', "xgboost"),
        ("m.safetensors", safetensors_file({}), "safetensors"),
        ("config.json", b'{"model_type": "bert"}', ""),
        ("empty", b"", ""),
        ("empty.pkl", b"", "pickle"),
        ("photo.bin", b"\x80\x02 is not an opcode", ""),
    ],
    # Don't use bytes in test ids: gzip data contain the time, and all pytest processes must collect the same ids.
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_file_format_is_recognized_by_bytes_and_name(tmp_path, name, content, expected):
    found = format_of(written(tmp_path, name, content))
    assert found == expected
    assert found in TITLES or not found


def test_torch_file_formats_are_distinguished(tmp_path):
    module = torch.nn.Linear(3, 2)
    made = {
        "weights.pt": ("torch", lambda path: torch.save(module.state_dict(), path)),
        "old.pth": (
            "torch",
            lambda path: torch.save(module.state_dict(), path, _use_new_zipfile_serialization=False),
        ),
        "script.pt": ("torchscript", lambda path: torch.jit.save(torch.jit.trace(module, torch.ones(1, 3)), path)),
        "export.pt2": (
            "torch-export",
            lambda path: torch.export.save(torch.export.export(module, (torch.ones(1, 3),)), path),
        ),
    }
    found = {}
    for name, (_, save) in made.items():
        with warnings.catch_warnings():  # warnings of torch about its older formats do not matter here
            warnings.simplefilter("ignore")
            save(tmp_path / name)
        found[name] = format_of(tmp_path / name)
    assert found == {name: expected for name, (expected, _) in made.items()}


@pytest.mark.parametrize("compress", [0, 3, ("gzip", 3), ("bz2", 3), ("xz", 3), ("lzma", 3)])
def test_joblib_file_with_any_compression_is_recognized_as_a_pickle(tmp_path, compress):
    joblib.dump({"weights": numpy.ones(100)}, tmp_path / "model.bin", compress=compress)
    assert format_of(tmp_path / "model.bin") in HOLDS_PICKLE


@pytest.mark.promise("pickle-ever-loaded")
def test_format_detection_never_loads_a_pickle(tmp_path):
    bomb = Bomb(tmp_path / "went-off")
    write_tree(
        tmp_path / "made",
        {"a.pkl": pickle.dumps(bomb), "b.joblib": zlib.compress(pickle.dumps(bomb)), "c.pt": zip_of("x/data.pkl")},
    )
    record = registry.add(tmp_path / "ws", "bomb", sources.local(tmp_path / "made"))
    assert [file.format for file in record.files] == ["pickle", "joblib", "torch"]
    assert not (tmp_path / "went-off").exists()
    pickle.loads((tmp_path / "made/a.pkl").read_bytes()).close()
    assert (tmp_path / "went-off").exists()


# --- tests of safetensors files


def test_tensors_of_a_safetensors_file_are_read_from_its_header(tmp_path):
    content = safetensors_file(
        {
            "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        },
        {"format": "pt"},
        bytes(26),
    )
    found = header(written(tmp_path, "m.safetensors", content))
    assert found.tensors == (
        Tensor(name="a", dtype="F32", shape=(2, 3)),
        Tensor(name="b", dtype="BF16", shape=()),
    )
    assert (found.parameters, found.metadata) == (7, {"format": "pt"})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 5) + b"{}",
        struct.pack("<Q", 3) + b"{} and more"[:3].replace(b" ", b"x"),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        safetensors_file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, data=b"1234"),
        safetensors_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, data=b"1234", cut=1),
        safetensors_file({"a": {"dtype": "F32", "shape": [1]}}),
        struct.pack("<Q", 200_000) + b'{"a":' * 40_000,
    ],
    ids=range(11),
)
def test_header_of_an_invalid_or_truncated_safetensors_file_is_none(tmp_path, content):
    assert header(written(tmp_path, "m.safetensors", content)) is None


# --- tests of the recorded framework


def framework(tmp_path, name, content, run=None):
    path = written(tmp_path, name, content)
    file = ModelFile(name=name, size_bytes=len(content), sha256="", format=format_of(path))
    return framework_of(tmp_path, [file], run or {})


RUN = {
    "framework": None,
    "environment": {"packages": ["torch==2.13.0+cpu", "scikit_learn==1.5.2"], "pip": ["onnx==1.17"]},
}


@pytest.mark.parametrize(
    ("name", "content", "run", "expected"),
    [
        ("m.pt", zip_of("m/data.pkl"), RUN, ("pytorch", "2.13.0+cpu")),
        ("m.onnx", b"\x08\x08", RUN, ("onnx", "1.17")),
        ("m.skops", zip_of("schema.json"), RUN, ("sklearn", "1.5.2")),
        ("m.safetensors", safetensors_file({}), RUN, ("pytorch", "2.13.0+cpu")),
        ("m.safetensors", safetensors_file({}), {}, (None, None)),
        ("m.pkl", PICKLE, {"framework": "sklearn"}, ("sklearn", None)),
        ("m.pkl", PICKLE, RUN, (None, None)),
        ("config.json", b"{}", RUN, (None, None)),
    ],
)
def test_framework_and_version_of_a_model_are_detected_from_its_files_and_run(tmp_path, name, content, run, expected):
    assert framework(tmp_path, name, content, run) == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_version_of_scikit_learn_is_read_from_its_pickle(tmp_path, protocol):
    linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    import sklearn

    content = pickle.dumps(linear_model.LogisticRegression().fit([[0.0], [1.0]], [0, 1]), protocol)
    assert framework(tmp_path, "m.pkl", content, RUN) == ("sklearn", sklearn.__version__)


def test_joblib_file_of_an_estimator_is_detected_as_scikit_learn(tmp_path):
    linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    joblib.dump(linear_model.LinearRegression().fit([[0.0], [1.0]], [0, 1]), tmp_path / "m.joblib")
    found, version = framework(tmp_path, "m.joblib", (tmp_path / "m.joblib").read_bytes())
    assert (found, bool(version)) == ("sklearn", True)
