"""Azure's curated environments, replaced by the packages that this interpreter has."""

from __future__ import annotations

import re

#: Curated environments that `Environment.list` returns. `is_curated` also accepts other names that begin with "AzureML-".
CURATED = (
    *(
        "AzureML-Minimal",
        "AzureML-Tutorial",
        "AzureML-PyTorch-1.6-GPU",
        "AzureML-TensorFlow-2.3-GPU",
        "AzureML-Scikit-learn-0.20.3",
    ),
    *("AzureML-sklearn-1.5", "AzureML-ACPT-pytorch-1.11-py38-cuda11.3-gpu", "AzureML-tensorflow-2.16-cuda12"),
    *("azureml-sklearn-1.5", "azureml-acpt-pytorch-2.2-cuda12.1", "azureml-tensorflow-2.11-cuda11"),
)
#: Word in a curated environment's name -> module that a script in this environment imports.
_MODULES = {
    "pytorch": "torch",
    "tensorflow": "tensorflow",
    "sklearn": "sklearn",
    "scikit-learn": "sklearn",
    "lightgbm": "lightgbm",
    "xgboost": "xgboost",
    "minimal": "",
    "tutorial": "sklearn",
    "chainer": "chainer",
    "pyspark": "pyspark",
    "vowpalwabbit": "vowpalwabbit",
    "designer": "",
    "responsibleai": "",
    "automl": "",
    "ai-studio": "",
    "model-management": "",
}


def is_curated(name: object) -> bool:
    """Return whether Azure has, or had, a curated environment of this name."""
    return (
        isinstance(name, str)
        and re.match(r"azureml-", name, re.IGNORECASE) is not None
        and any(word in name.lower() for word in _MODULES)
    )


def module_of(name: str) -> str:
    """Return a curated environment's main module, such as "torch", or "" if unknown."""
    return next((module for word, module in _MODULES.items() if word in name.lower()), "")
