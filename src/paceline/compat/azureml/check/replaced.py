"""What a job for Azure asks for that can't be had here, and what it gets, as far as the text of a program shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CLUSTER = "means this machine, or a target that is added under this name (paceline compute add)."
_OLD = (
    # Not np.bool and np.long, which NumPy 2 has again.
    (r"^(?:np|numpy)\.(float|int|object|str|complex)$", "np.{0} was removed in NumPy 1.24: write {0}."),
    (r"^sklearn\.externals", "it was removed in scikit-learn 0.23: import joblib itself."),
    (r"^(?:tf|tensorflow)\.contrib", "tf.contrib ended with TensorFlow 1."),
    (
        r"^tf\.(?:placeholder|Session|global_variables_initializer|app|flags|ConfigProto)\b",
        "it is TensorFlow 1: write `import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()`.",
    ),
    (r"^horovod\.spark", "horovod.spark is not here: submit the training as a run on ranks."),
    (r"^tensorflow\.examples", "tensorflow.examples ended with TensorFlow 1: use tf.keras.datasets."),
)
_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _OLD)


def of_old_library(name: str) -> str | None:
    """The edit that a name of a library needs, which that has removed since; None for any other."""
    for pattern, text in _COMPILED:
        if (match := pattern.search(name)) is not None:
            return text.format(*match.groups())
    return None


def of_call(name: str, values: Mapping[str, Any], words: Sequence[Any]) -> Iterator[str]:
    """What is replaced in a call. name: of what is called; values: its constants by keyword; words: those by position."""
    last = name.rpartition(".")[2]
    if last == "provisioning_configuration":
        yield f"vm_size={values['vm_size']!r} {CLUSTER}" if values.get("vm_size") else f"a cluster {CLUSTER}"
    target = values.get("compute_target")
    if name.startswith("azureml.") and isinstance(target, str) and target.lower() not in ("local", "amlcompute", ""):
        yield f"compute_target={target!r} {CLUSTER}"
    if name in ("azureml.core.Workspace", "azureml.core.workspace.Workspace") or name.endswith(".Workspace.get"):
        yield "whatever its name, it is this machine's workspace (docs/from-azureml.md)."
    if last in ("register_azure_file_share", "register_azure_data_lake", "register_hdfs", "register_dbfs"):
        yield "it means a folder that is added under the store's name: paceline data add NAME /mnt/NAME"
    if name.startswith("azureml.train.") and values.get("use_gpu") is True:
        yield "use_gpu=True: on a machine without GPUs the workers run on its CPUs."
    if name.startswith("azureml.train.") and values.get("framework_version"):
        yield f"framework_version={values['framework_version']!r}: the version that is installed is used."
    if name.startswith("azureml.train.") and (image := values.get("custom_docker_image")):
        yield f"custom_docker_image={image!r} is used where podman or docker answers."
    if last == "init_process_group" and ("nccl" in words or values.get("backend") == "nccl"):
        yield "NCCL works on GPUs alone: write 'gloo' where there is none."
    if last == "Environment" and words and str(words[0]).lower().startswith("azureml-"):
        yield f"the curated environment {words[0]!r} is what is installed here."
    for package in (word for word in words if isinstance(word, str)):
        if last in ("add_conda_package", "add_pip_package") and package.startswith("azureml"):
            yield f"{package} is left out: scripts have the names of azureml from Paceline."
