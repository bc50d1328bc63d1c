"""The framework that a model is of, with its version: seen from its files and from the environment of its run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.models.record import ModelFile

#: Format -> framework.
_BY_FORMAT = {
    **dict.fromkeys(("torch", "torchscript", "torch-export"), "pytorch"),
    **dict.fromkeys(("savedmodel", "tflite"), "tensorflow"),
    "keras": "keras",
    "onnx": "onnx",
    "skops": "sklearn",
    "xgboost": "xgboost",
    "lightgbm": "lightgbm",
}
#: Framework -> distributions that are it, the first that is there counts.
_DISTRIBUTIONS = {
    "pytorch": ("torch",),
    "sklearn": ("scikit-learn",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
    "keras": ("keras", "tensorflow"),
    "onnx": ("onnx", "onnxruntime"),
    "xgboost": ("xgboost", "xgboost-cpu"),
    "lightgbm": ("lightgbm",),
}
#: Modules that a pickle names, in the order in which they decide.
_MODULES = (
    (b"xgboost", "xgboost"),
    (b"lightgbm", "lightgbm"),
    (b"sklearn", "sklearn"),
    (b"torch", "pytorch"),
    (b"keras", "keras"),
)
_ONE_END = 1 << 20
# As scikit-learn's estimators write themselves: the key, a memo of it, and a short text of that length.
_SKLEARN_VERSION = re.compile(
    rb"_sklearn_version(?:\x94|h.|q.|r....)*(?:\x8c(.)|X(.)\x00\x00\x00)([0-9][0-9A-Za-z.+]*)", re.S
)


def framework_of(folder: Path, files: Sequence[ModelFile], run: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(framework, version), None for what can't be told.

    folder: of the files. run: as `lineage.of_run` tells of it.
    """
    formats = {file.format for file in files}
    found = next((_BY_FORMAT[name] for name in _BY_FORMAT if name in formats), None)
    version = None
    if found is None:
        found, version = _of_pickles(folder, files)
    if found is None and formats & {"safetensors", "pickle", "joblib"}:
        # Many frameworks write these, so the run decides.
        found = run.get("framework")
        if found is None and "safetensors" in formats:
            found = "pytorch" if _version("pytorch", run) else None
    return found, version or (_version(found, run) if found else None)


def _of_pickles(folder: Path, files: Sequence[ModelFile]) -> tuple[str | None, str | None]:
    """By the modules whose names stand in it, which are read as bytes."""
    for file in files:
        if file.format in ("pickle", "joblib"):
            with open(folder / file.name, "rb") as opened:
                text = opened.read(_ONE_END)
                if file.size_bytes > 2 * _ONE_END:
                    opened.seek(-_ONE_END, 2)
                text += opened.read(_ONE_END)
            for module, framework in _MODULES:
                # "sklearn.linear_model", as a module's name stands in a pickle.
                if re.search(rb"[\x00-\x20]" + module + rb"[.\n\x94_]|c" + module + rb"[.\n]", text):
                    return framework, _sklearn_version(text) if framework == "sklearn" else None
    return None, None


def _sklearn_version(text: bytes) -> str | None:
    found = _SKLEARN_VERSION.search(text)
    if found is None:
        return None
    length = (found[1] or found[2])[0]
    return found[3][:length].decode("ascii")


def _version(framework: str, run: Mapping[str, Any]) -> str | None:
    environment = run.get("environment") or {}
    listed = [*(environment.get("packages") or ()), *(environment.get("pip") or ())]
    versions = {_canonical(name): version for name, _, version in (one.partition("==") for one in listed)}
    return next((versions[name] for name in _DISTRIBUTIONS.get(framework, (framework,)) if versions.get(name)), None)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
