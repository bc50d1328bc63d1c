"""What scripts of years ago stop at on today's libraries, and the edit that helps, in one line each."""

from __future__ import annotations

import re

from paceline.runs.failure import FailureReport

#: What the exception says -> the edit. The first that fits counts.
_EDITS = (
    (
        r"module 'numpy' has no attribute '(float|int|bool|object|str|complex|long|unicode)'",
        "np.{0} was removed in NumPy 1.24: write {1}.",
    ),
    (r"module 'numpy' has no attribute '(asscalar)'", "np.asscalar(x) was removed from NumPy: write x.item()."),
    (
        r"No module named 'sklearn\.externals",
        "sklearn.externals was removed in scikit-learn 0.23: write `import joblib`.",
    ),
    (
        r"cannot import name '(joblib)' from 'sklearn\.externals'",
        "It was removed in scikit-learn 0.23: write `import joblib`.",
    ),
    (r"invalid index of a 0-dim tensor", "Since PyTorch 0.5 a loss is a number: write loss.item() for loss.data[0]."),
    (
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver",
        "This PyTorch, or this machine, has no CUDA: write device = 'cuda' if torch.cuda.is_available() else 'cpu', and "
        ".to(device) for .cuda().",
    ),
    (
        r"Distributed package doesn't have NCCL|ProcessGroupNCCL is only supported with GPUs|NCCL.*no GPUs found",
        "NCCL works on GPUs alone: write init_process_group('gloo') where there is none.",
    ),
    (
        r"Weights only load failed|WeightsUnpickler error",
        "Since PyTorch 2.6 torch.load reads tensors alone: save model.state_dict(), or, for a file that you trust, write "
        "torch.load(path, weights_only=False).",
    ),
    (
        r"No module named 'tensorflow\.contrib'|'tensorflow' has no attribute 'contrib'",
        "tf.contrib ended with TensorFlow 1: its parts are in tf.keras, tensorflow_addons and tf_slim.",
    ),
    (
        r"module 'tensorflow' has no attribute '(Session|placeholder|global_variables_initializer|app|flags|logging|train|"
        r"ConfigProto|get_variable|layers|losses|summary|gfile|reset_default_graph)'|tf\.placeholder\(\) is not compatible",
        "The script is written for TensorFlow 1: write `import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()`.",
    ),
    (
        r"No module named 'tensorflow\.examples'",
        "tensorflow.examples ended with TensorFlow 1: write tf.keras.datasets.mnist.load_data().",
    ),
    (
        r"No module named 'horovod\.spark'|horovod\.spark",
        "horovod.spark is not here: submit the training as a run on ranks.",
    ),
    (
        r"The filename must end in `\.weights\.h5`",
        "Keras 3 wants save_weights('x.weights.h5') for save_weights('x.h5').",
    ),
    (r"No module named 'azureml\.(train\.automl|automl|interpret|contrib|dataprep)", "See docs/from-azureml.md."),
    (
        r"'DataFrame' object has no attribute '(append|ix)'",
        "DataFrame.{0} was removed from pandas: write pd.concat([a, b]), or .loc.",
    ),
    (r"No module named 'imp'", "imp was removed in Python 3.12: write importlib."),
    (
        r"cannot import name '(Mapping|Iterable|Sequence|Callable|MutableMapping)' from 'collections'",
        "It moved: write `from collections.abc import {0}`.",
    ),
)
_COMPILED = tuple((re.compile(pattern), edit) for pattern, edit in _EDITS)
#: Python's own types, which NumPy's old names stood for.
_PLAIN = {"long": "int", "unicode": "str"}


def edit_for(report: FailureReport) -> str | None:
    """The edit that helps, in a sentence; None where the exception is none of these."""
    said = report.exception or ""
    for pattern, edit in _COMPILED:
        if (match := pattern.search(said)) is not None:
            name = next((group for group in match.groups() if group), "")
            return edit.format(name, _PLAIN.get(name, name))
    return None
