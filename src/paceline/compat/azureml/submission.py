"""The conversion of a ScriptRunConfig into a job.

The conversion happens at submission, because programs may change the configuration until then.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from paceline import Job
from paceline.compat.azureml.core.compute import resolve
from paceline.compat.azureml.core.runconfig import DataReferenceConfiguration, RunConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig, argument_list
from paceline.compat.azureml.data.data_reference import SdkDataReference
from paceline.compat.azureml.exceptions import RunConfigurationException, UserErrorException
from paceline.compat.azureml.packages import spec_of, with_notebooks
from paceline.compat.azureml.policy import SubmissionNotes
from paceline.compat.azureml.stores import place_in
from paceline.data import MODEL_LOCATION, DataReference, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import Workspace


class Shape(TypedDict, total=False):
    """The numbers of nodes and processes of a job, and its distributed backend."""

    node_count: int
    process_count_per_node: int
    distributed_backend: str | None
    worker_count: int
    parameter_server_count: int


#: Name of a field of `Job` -> the field's value.
Fields: TypeAlias = "dict[str, Any]"
#: Values of `communicator` that select Open MPI. Azure ran Open MPI for all of them, even for IntelMpi.
_MPI = ("IntelMpi", "OpenMpi", "Mpi")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A job with its source folder and its notes, ready to submit."""

    job: Job
    source_directory: Path
    notes: tuple[str, ...]
    #: The notes in `notes` that no earlier submission of this program has logged.
    said: tuple[str, ...]


def prepared(config: ScriptRunConfig, workspace: Workspace, *, run_id: str = "") -> Prepared:
    """Convert a ScriptRunConfig into a job.

    `run_id` is the id that the run will get, or "" if unknown. The names of the run's output folders contain this id.
    """
    notes = SubmissionNotes()
    run = config.settled().run_config
    directory = Path(config.source_directory or ".")
    words, references = words_of(argument_list(run.arguments), workspace, run_id)
    _note_places(
        [
            *argument_list(run.arguments),
            *(run.command if isinstance(run.command, (list, tuple)) else ()),
            *(run.data or {}).values(),
            *(run.data_references or {}).values(),
        ],
        notes,
    )
    entry: dict[str, object]
    if run.command:
        entry, more = _command(run.command, workspace, run_id)
        references += more
    else:
        entry = _entry(run.script, words, directory)
    # If the arguments contain a data reference, use it instead of the run configuration's reference of the same name.
    named = {one.name for one in references}
    references += [one for one in _configured(run, workspace, run_id) if one.name not in named]
    target = resolve(run.target, workspace, notes)
    environment = spec_of(run.environment, notes, use_docker=run.docker.use_docker or None)
    if not run.command and str(run.script).endswith(".ipynb"):
        environment = with_notebooks(environment, notes)
    shape = distribution(run)
    values: Fields = {
        **entry,
        "compute_target": target,
        "environment": dataclasses.replace(
            environment, version=run.environment.version_in(workspace) if run.environment else None
        ),
        "environment_variables": {
            **environment.environment_variables,
            **_names_of(workspace),
            **{str(name): str(value) for name, value in (run.environment_variables or {}).items()},
        },
        "inputs": tuple(dict.fromkeys(map(_plain_reference, references))),
        "max_run_duration_seconds": run.max_run_duration_seconds or None,
        "use_gpu": getattr(config, "use_gpu", False) and _has_gpus(target, shape, workspace, notes),
        **shape,
    }
    if (framework := (run.framework or "").lower()) in ("pytorch", "tensorflow"):
        values["framework"] = framework
    if config.resume_from is not None:
        values = _resumed(values, config.resume_from, workspace)
    return Prepared(Job(**values), directory, notes.all(), notes.show())


def words_of(arguments: list[object], workspace: Workspace, run_id: str) -> tuple[list[str], list[DataReference]]:
    """Return the arguments as strings, and the data references among them.

    Raises:
        UserErrorException: A value can't be a script argument.
    """
    words: list[str] = []
    references: list[DataReference] = []
    for value in arguments:
        reference = reference_of(value, workspace, run_id)
        if reference is not None:
            references.append(reference)
            words.append(str(reference))
        elif value is None or isinstance(value, (dict, set)):
            raise UserErrorException(f"an argument is {value!r}; arguments must be strings, numbers, paths or data.")
        else:
            words.append(os.fspath(value) if isinstance(value, os.PathLike) else str(value))
    return words, references


def _plain_reference(reference: DataReference) -> DataReference:
    """Convert an SdkDataReference to Paceline's class, so that equal references compare equal."""
    if not isinstance(reference, SdkDataReference):
        return reference
    return DataReference(**{field.name: getattr(reference, field.name) for field in dataclasses.fields(reference)})


def _names_of(workspace: Workspace) -> dict[str, str]:
    """Return the environment variables that tell workers the workspace's names.

    AZUREML_ARM_WORKSPACE_NAME is always set, because it tells workers that the SDK's API submitted the run. The
    variables of a subscription or resource group "local" are omitted, because workers have this value by default.
    """
    names = {"SUBSCRIPTION": "subscription_id", "RESOURCEGROUP": "resource_group"}
    others = {f"AZUREML_ARM_{key}": getattr(workspace, name) for key, name in names.items()}
    others = {key: name for key, name in others.items() if name != "local"}
    return {**others, "AZUREML_ARM_WORKSPACE_NAME": workspace.name}


def _note_places(values: list[object], notes: SubmissionNotes) -> None:
    """Add a note on inputs with absolute paths, because Paceline ignores these paths."""
    for value in values:
        place = getattr(value, "path_on_compute", None)
        if isinstance(place, str) and place.startswith("/"):
            name = getattr(value, "name", None) or getattr(value, "datastore_name", None)
            notes.add(f"The input {name!r} does not appear at {place}: the script receives its path as an argument.")


def reference_of(value: object, workspace: Workspace, run_id: str = "") -> DataReference | None:
    """Return the data reference for an SDK data object, or None for other values."""
    if isinstance(value, DataReference):
        return value
    if hasattr(value, "reference") and hasattr(value, "destination"):
        output: DataReference = value.reference(workspace, run_id)
        return output
    # Datastores and datasets have this method, which converts them to references.
    if hasattr(value, "as_reference"):
        found = value.as_reference()
        return found if isinstance(found, DataReference) else None
    if isinstance(value, DataReferenceConfiguration):
        path = value.path_on_datastore or ""
        # A path without a store that is absolute, as from `to_config` of a run's outputs, is on this machine.
        is_here = value.datastore_name is None and path.startswith("/")
        return DataReference(
            name="input",  # a placeholder: the caller sets the real name
            sources=(Source(path=path) if is_here else place_in(workspace, value.datastore_name, path.strip("/")),),
            mode=value.mode or "mount",
            overwrite=bool(value.overwrite),
        )
    return None


def distribution(run: RunConfiguration) -> Shape:
    """Return the nodes, processes and backend that a run configuration requests.

    Raises:
        RunConfigurationException: The nodes can't share the processes evenly.
    """
    communicator, nodes, per_node = run.communicator or "None", int(run.node_count or 1), 1
    backend: str | None
    if communicator in _MPI:
        per_node, backend = int(run.mpi.process_count_per_node or 1), "mpi"
    elif communicator == "ParameterServer":
        servers, workers = int(run.tensorflow.parameter_server_count), int(run.tensorflow.worker_count)
        if servers != 0:
            return {
                "node_count": nodes,
                "distributed_backend": "ps",
                "worker_count": workers,
                "parameter_server_count": servers,
            }
        nodes, backend = workers, "tensorflow"
    else:
        if communicator.lower() in ("nccl", "gloo") or run.framework == "PyTorch":
            total = run.pytorch.process_count
            per_node = 1 if total is None else int(total) // nodes
            if total is not None and int(total) % nodes:
                raise RunConfigurationException(
                    f"process_count={total} is not a multiple of node_count={nodes}. Give a multiple of it."
                )
        elif communicator != "None":
            raise RunConfigurationException(
                f"communicator={communicator!r} must be None, IntelMpi, OpenMpi, Nccl, Gloo or ParameterServer."
            )
        # For "gloo", Paceline only sets the variables that torch reads. The script may choose another backend.
        backend = "gloo" if nodes * per_node > 1 else None
    return {"node_count": nodes, "process_count_per_node": per_node, "distributed_backend": backend}


def _has_gpus(target: str, shape: Shape, workspace: Workspace, notes: SubmissionNotes) -> bool:
    """Return whether each worker can have a GPU. Checks only the target "local"."""
    if target != "local":
        return True
    from paceline.targets import ComputeTargets

    count = int(shape.get("node_count", 1)) * int(shape.get("process_count_per_node", 1))
    there = ComputeTargets(workspace.path)["local"].get_status().nodes[0].gpus or 0
    if count <= there:
        return True
    notes.add(f"use_gpu=True with {count} workers, and this machine has {there or 'no'} GPUs: they run on its CPUs.")
    return False


def _entry(script: str | None, words: list[str], directory: Path) -> dict[str, object]:
    if not script:
        raise UserErrorException("the script or command is missing. Give ScriptRunConfig(script='train.py').")
    if script.endswith(".ipynb"):
        # As in the SDK, nbconvert executes the notebook in the source folder, and stores the result in the folder `outputs`.
        name = Path(script).name
        convert = ["python", "-m", "nbconvert", "--to", "notebook", "--execute", script, "--output-dir", "outputs"]
        if _is_python(directory / script):
            # Replace the notebook's kernel name, such as python36: here it may belong to another interpreter.
            convert.append("--ExecutePreprocessor.kernel_name=python3")
        return {"entry_script": "bash", "arguments": ("-c", shlex.join([*convert, "--output", name]))}
    return {"entry_script": Path(script).as_posix(), "arguments": tuple(words)}


def _is_python(notebook: Path) -> bool:
    try:
        metadata = json.loads(notebook.read_text(encoding="utf-8")).get("metadata", {})
        kernel = metadata.get("kernelspec", {})
        return "python" in str(
            kernel.get("language") or metadata.get("language_info", {}).get("name") or kernel.get("name", "python")
        )
    except (OSError, ValueError, AttributeError):
        return False


def _command(
    command: str | Sequence[object], workspace: Workspace, run_id: str
) -> tuple[dict[str, object], list[DataReference]]:
    """Return the shell command and the references of the data that it uses.

    Like the SDK, this joins the items of a list with spaces without quotes. So an item may contain several words.
    """
    if isinstance(command, str):
        return {"entry_script": "bash", "arguments": ("-c", command)}, []
    items = list(command)
    words, references = words_of(items, workspace, run_id)
    # Quote only paths that replace objects such as datasets: the user's own words may contain shell syntax.
    line = " ".join(
        word if isinstance(item, str) else f'"{word}"' if word.startswith("$") else shlex.quote(word)
        for item, word in zip(items, words, strict=True)
    )
    return {"entry_script": "bash", "arguments": ("-c", line)}, references


def _configured(run: RunConfiguration, workspace: Workspace, run_id: str) -> list[DataReference]:
    found: list[DataReference] = []
    for part in (run.data_references, run.data, run.output_data):
        for name, value in (part or {}).items():
            reference = reference_of(value, workspace, run_id)
            if reference is None:
                raise UserErrorException(f"{name!r} of the run configuration's data is {value!r}, which is not data.")
            found.append(dataclasses.replace(reference, name=str(name)))
    return found


def _resumed(values: Fields, resume_from: object, workspace: Workspace) -> Fields:
    create: Any = getattr(resume_from, "create_data_reference", None)
    reference = reference_of(create(MODEL_LOCATION) if create else resume_from, workspace)
    if reference is None:
        raise UserErrorException(f"resume_from={resume_from!r} must be a DataPath.")
    reference = dataclasses.replace(reference, name=MODEL_LOCATION)
    values["arguments"] = (*values["arguments"], "--resume-from", str(reference))
    values["inputs"] = (*values["inputs"], reference)
    return values
