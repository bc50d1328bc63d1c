"""Runner of scikit-learn estimators in files of joblib or pickle."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.errors import ServingError
from paceline.serving.model.answers import InputError
from paceline.serving.model.runners.base import Array, Outputs, TensorInfo, blamed
from paceline.serving.model.tensors import datatype_of

_METHODS = ("predict", "predict_proba", "decision_function", "transform")


class SklearnRunner:
    platform = "sklearn"
    batches = True

    def __init__(self, path: str) -> None:
        import joblib

        # Warn the user, because loading a pickle can run any code.
        print(f"paceline: loading {path} runs what is in it, for it is a pickle.", file=sys.stderr, flush=True)
        with warnings.catch_warnings():
            # Hide joblib's warning that it can't map a compressed file.
            warnings.filterwarnings("ignore", message="mmap_mode")
            # Map arrays from the file, so that all processes share them until one writes to them.
            self._model = joblib.load(path, mmap_mode="c")
        methods = [name for name in _METHODS if callable(getattr(self._model, name, None))]
        if not methods:
            raise ServingError(
                f"{path} holds a {type(self._model).__name__}, which has no method of {', '.join(_METHODS)}. Serve it with an "
                "entry script."
            )
        self.default = methods[:1]
        self.inputs = [self._input()]
        self._names = self._columns()
        self.outputs = [self._output(name) for name in methods]

    def _input(self) -> TensorInfo:
        """Describe the estimator's input: numbers with a column for each feature, or texts."""
        steps = getattr(self._model, "steps", None)
        first = steps[0][1] if steps else self._model
        if hasattr(first, "build_analyzer"):
            return TensorInfo("input", "BYTES", (-1,))
        return TensorInfo("input", "FP64", (-1, int(getattr(self._model, "n_features_in_", -1))))

    def _output(self, name: str) -> TensorInfo:
        """Return an output's type and shape, found by predicting a row of zeros."""
        info = self.inputs[0]
        is_text = info.datatype == "BYTES"
        row = np.array([""], dtype=object) if is_text else np.zeros((1, max(1, (info.shape or (-1,))[-1])))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = self.run({info.name: row}, [name])[name]
            return TensorInfo(name, datatype_of(value.dtype), (-1, *value.shape[1:]))
        except Exception:  # the model does not accept a row of zeros
            return TensorInfo(name, "FP64", None)

    def _columns(self) -> list[str] | None:
        names = getattr(self._model, "feature_names_in_", None)
        if names is None:
            return None
        try:
            import pandas  # noqa: F401 - only looked for
        except ImportError:
            return None
        return [str(name) for name in names]

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Outputs:
        (rows,) = inputs.values()
        if self._names is not None and getattr(rows, "ndim", 0) == 2:
            import pandas

            rows = pandas.DataFrame(rows, columns=self._names)
        try:
            return {name: getattr(self._model, name)(rows) for name in wanted}
        except (ValueError, TypeError, KeyError) as reason:
            text = blamed(reason)
            if text is None:
                raise
            raise InputError(f"the model can't take this input: {text}") from None

    def frame(self, rows: list[dict[str, Any]]) -> Any:
        """Convert rows with column names to a DataFrame.

        Raises:
            InputError: The model was fitted without names, pandas is missing, or a name is missing or unknown.
        """
        if self._names is None:
            raise InputError(
                "the model was fitted without names, or pandas is not in its environment. Send lists of numbers."
            )
        import pandas

        for at, row in enumerate(rows):
            for name in row:
                if name not in self._names:
                    raise InputError(f"data[{at}] has {name[:100]!r}, which is not one of {', '.join(self._names)}.")
            if missing := [name for name in self._names if name not in row]:
                raise InputError(f"data[{at}] lacks {missing[0]!r}.")
        return pandas.DataFrame(rows, columns=self._names)
