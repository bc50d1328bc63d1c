"""Load models without a scoring script: find a model's file, and the runner for its framework."""

from __future__ import annotations

import os
import zipfile

from paceline.errors import ServingError
from paceline.serving.model.answers import show
from paceline.serving.model.runners.base import Runner
from paceline.serving.wire import ModelSetup, Servable

SKLEARN, ONNX, TORCHSCRIPT, EXPORTED = "sklearn", "onnx", "torchscript", "torch-export"
#: Name of a framework in a configuration -> kinds of model files that the framework may load.
FRAMEWORKS = {
    **{name: (name,) for name in (SKLEARN, ONNX, TORCHSCRIPT, EXPORTED)},
    "scikit-learn": (SKLEARN,),
    "pytorch": (TORCHSCRIPT, EXPORTED),
}
_ENDINGS = {
    **dict.fromkeys((".joblib", ".pkl", ".pickle"), SKLEARN),
    ".onnx": ONNX,
    ".pt2": EXPORTED,
    **dict.fromkeys((".pt", ".pth", ".ts", ".torchscript"), TORCHSCRIPT),
}


def load_builtin(setup: ModelSetup) -> Servable:
    """Load the only model of a configuration, to be served without a script."""
    (model,) = setup.config.models
    path, kind = model_file(model.path, model.framework)
    # Choose the name of the file of shared weights, which all processes of a revision map into memory.
    shared = setup.shared if setup.config.workers > 1 else None
    status = os.stat(path)
    key = f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    if kind == TORCHSCRIPT:
        _check_torchscript(path)
    try:
        runner = _runner(path, kind, shared, key)
    except ServingError:
        raise
    except Exception as error:
        show(error)
        raise ServingError(f"{path} can't be loaded: {type(error).__name__}: {error}") from error
    from paceline.serving.model.as_it_is import AsItIs

    return AsItIs(runner, setup.config)


def _runner(path: str, kind: str, shared: str | None, key: str) -> Runner:
    if kind == SKLEARN:
        from paceline.serving.model.runners.sklearn import SklearnRunner

        return SklearnRunner(path)
    if kind == ONNX:
        from paceline.serving.model.runners.onnx import OnnxRunner

        return OnnxRunner(path)
    from paceline.serving.model.runners.torch import ExportedRunner, TorchScriptRunner

    return (ExportedRunner if kind == EXPORTED else TorchScriptRunner)(path, shared, key)


def model_file(path: str, framework: str | None) -> tuple[str, str]:
    """Return the path and the kind of the file that holds the model.

    path: The file, or a folder with exactly one file of the framework.
    framework: The framework's name, such as "sklearn"; None for any framework.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise ServingError(
            f"framework={framework!r} can't be served without an entry script. That can be: {', '.join(FRAMEWORKS)}."
        )
    kinds = FRAMEWORKS[framework] if framework else tuple(dict.fromkeys(_ENDINGS.values()))
    names = (
        [path]
        if os.path.isfile(path)
        else sorted(os.path.join(base, name) for base, _, files in os.walk(path) for name in files)
    )
    files_of_kind = [
        (name, kind)
        for name in names
        if (kind := _ENDINGS.get(os.path.splitext(name)[1].lower(), "")) in kinds and kind
    ]
    if len(files_of_kind) != 1:
        what = f"{len(files_of_kind)} files" if files_of_kind else "no file"
        which = f": {', '.join(os.path.relpath(name, path) for name, _ in files_of_kind[:5])}" if files_of_kind else ""
        raise ServingError(
            f"{path!r} has {what} of a kind that is served without an entry script{which}. Such are {', '.join(_ENDINGS)}. Keep "
            "one, or write an entry script."
        )
    return files_of_kind[0]


def _check_torchscript(path: str) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any("/code/" in name for name in archive.namelist()):
                return
    raise ServingError(
        f"{path} is not TorchScript: it holds weights or pickled objects, as torch.save writes them. Serve it with an entry "
        "script that makes the model, or save it by torch.jit.script(model).save(...) or torch.export.save(...)."
    )
