"""Estimators, with the names and defaults of the Azure Machine Learning SDK.

An estimator describes a `Job`. Its constructor makes the job and refuses wrong values. `Experiment.submit` submits the job.
"""

from __future__ import annotations

import datetime as dt
import inspect
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from numbers import Number
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.environments.from_parameters import described
from paceline.errors import JobError
from paceline.job.data_reference import DataReference
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import (
    DEFAULT_ELASTIC_S,
    DEFAULT_GRACE_S,
    DEFAULT_HANG_S,
    Backend,
    GpuVisibility,
    Job,
    OnFailure,
    OnHang,
    Priority,
    Warm,
)
from paceline.job.notify import DEFAULT_EVENTS
from paceline.job.secret_values import Secret
from paceline.system import units
from paceline.system.gaps import DEFAULT_LIMIT
from paceline.system.units import size_bytes

if TYPE_CHECKING:
    from paceline.targets.configured import Configured


@dataclass
class _Script:
    """A script, its arguments, environment and limits: the common part of all estimators.

    Args:
        source_directory: Folder that is copied at submission, including uncommitted edits.
        entry_script: File in source_directory to run: a Python file, a binary, or a script that begins with #!. Or the name of a
            program on the nodes' PATH.
        entry_module: Module to run instead, as `python -m` does in source_directory.
        command: Command line to run instead: a text, or a list of words and data references. Each worker runs it by bash in the
            copy of source_directory. In the command, `python` is the job's interpreter.
        script_params: Argument -> value, in order. An empty string as value makes the argument a flag.
        arguments: Words that the script gets after script_params: strings, numbers, paths and data. Use them for
            positional arguments, repeated flags, and flags with several values.
        compute_target: Name of a target, or one of `Workspace.compute_targets`. None: "local".
        use_gpu: Whether each worker gets a GPU.
        gpu_visibility: "worker": each worker sees only its own GPU, as `cuda:0`. "node": each worker sees all GPUs of its node,
            for scripts that call `torch.cuda.set_device(LOCAL_RANK)`.
        gpu_share: Part of a GPU that each worker reserves, above 0 and up to 1. With 0.5, two such runs can use a GPU at the
            same time. On targets of kind "local" and "ssh" only.
        cores: Cores of this machine that the run reserves for each worker; a run with 0 never waits for cores. On "local" only.
        priority: Position among waiting runs: "low", "normal", "high", or "urgent", which also preempts runs of a lower
            priority. On "local" and "ssh" only.
        conda_packages: Match specs of conda packages.
        conda_channels: Channels of the conda packages, also as `file://`. None: conda-forge.
        pip_packages: Packages that the script needs in addition to its interpreter's packages, in pip's form.
        conda_dependencies_file: Conda's environment.yml, which replaces the lists of packages.
        pip_requirements_file: pip's requirements file, in source_directory or the working directory.
        layered: True adds the packages to the interpreter's packages, False makes an environment with only these packages.
            None: True for PyTorch, TensorFlow and SKLearn, False for Estimator.
        user_managed: Use the interpreter unchanged, without further packages.
        environment_definition: An `Environment`, instead of packages, python, image and user_managed.
        custom_docker_image: Image of the container that the workers run in.
        shm_size: Size of the container's /dev/shm, such as "2g". None: the host's /dev/shm is shared.
        environment_variables: Variables of every worker, with the highest priority. A `secret("NAME")` is never recorded.
        inputs: Data references and datasets, besides data in `arguments`. `run.input_datasets[name]` is the folder or dataset.
        send: Paths in source_directory, such as ignored data, that are not copied. Paceline sends them, in any size, to nodes
            that do not see the folder. It sends at most 1 GB of other files that are not copied.
        max_run_duration_seconds: Time after which the run is ended as Failed: seconds, a timedelta, or a text such as "1h30m" or
            Slurm's "1-12:00:00". None: no limit.
        python: Interpreter that runs the script, or that its environment is made from. None: the submitting interpreter.
        grace_period_seconds: Time between SIGTERM and SIGKILL when a run is ended.
        max_restarts: How often a run may restart after it lost a node, a worker or its launcher, or found a port in use.
            An attempt after a preemption does not count.
        on_failure: "restart" starts all workers again. "replace" starts only a lost worker again if the script allows it, and
            the other workers continue (needs max_restarts and "gloo").
        restart_on_exception: Also restart after an exception of the script itself.
        log_limit: Size to keep of each worker's log, from its beginning and its end: bytes, or "500MB". None or 0: no limit.
        notify: Receivers of messages: "mail:ann@example.com", "slack:env:SLACK_URL", "command:./told.sh", or a list.
        notify_on: Events to send: "allocated" (the run leaves the queue), "start" (workers run), "end", "failure", "hang",
            "quota" (over quota), "best" (a sweep's best trial), a condition such as "metrics.loss > 10", or a list.
        hang_seconds: Time without output, metrics or progress until the run counts as hanging: seconds, or "10m". 0: never.
        on_hang: Reaction to a hanging run: "report", "fail", or "restart" (needs max_restarts).
        warm: "auto" keeps the script's libraries loaded on each node for the next attempt; "off" starts each attempt cold.

    Raises:
        JobError: A value is wrong. The message has the value, the rule and a correct value.
    """

    source_directory: str | os.PathLike[str] | None = "."
    # The fields below are keyword-only, so that a new field never changes the position of another field.
    _: KW_ONLY
    entry_script: str | os.PathLike[str] | None = None
    entry_module: str | None = None
    command: str | Sequence[Any] | None = None
    script_params: Mapping[str, object] | None = None
    arguments: Sequence[Any] | None = None
    compute_target: str | Configured | None = None
    use_gpu: bool = False
    gpu_visibility: GpuVisibility = "worker"
    gpu_share: float = 1.0
    priority: Priority = "normal"
    cores: int = 1
    conda_packages: Sequence[str] | None = None
    conda_channels: Sequence[str] | None = None
    pip_packages: Sequence[str] | None = None
    conda_dependencies_file: str | None = None
    pip_requirements_file: str | None = None
    layered: bool | None = None
    user_managed: bool = False
    environment_definition: EnvironmentSpec | None = None
    custom_docker_image: str | None = None
    shm_size: str | None = None
    environment_variables: Mapping[str, str | Secret] | None = None
    inputs: Sequence[Any] | None = None
    send: Sequence[str | os.PathLike[str]] = ()
    max_run_duration_seconds: float | str | dt.timedelta | None = None
    python: str | os.PathLike[str] | None = None
    grace_period_seconds: float | str | dt.timedelta = DEFAULT_GRACE_S
    max_restarts: int = 0
    on_failure: OnFailure = "restart"
    restart_on_exception: bool = False
    log_limit: int | str | None = DEFAULT_LIMIT
    notify: Sequence[str] | str | None = None
    notify_on: Sequence[str] | str = DEFAULT_EVENTS
    hang_seconds: float | str | dt.timedelta = DEFAULT_HANG_S
    on_hang: OnHang = "report"
    warm: Warm = "auto"

    framework: ClassVar[str | None] = None
    backends: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        # Add the inherited parameters to the docstring, so that `help(PyTorch)` shows all of them.
        if cls.__doc__:
            text, _, examples = inspect.cleandoc(cls.__doc__).partition("\n\nExamples:\n")
            summary, _, own = text.partition("\n\nArgs:\n")
            above, _, end = inspect.cleandoc(cls.__base__.__doc__ or "").partition("\n\nArgs:\n")[2].partition("\n\n")
            arguments = "\n".join(part for part in (above, own) if part)
            raises = end.partition("\n\nExamples:")[0]
            cls.__doc__ = f"{summary}\n\nArgs:\n{arguments}\n\n{raises}\n\nExamples:\n{examples}".removesuffix(
                "\n\nExamples:\n"
            )

    def __post_init__(self) -> None:
        if self.source_directory is None:
            self.source_directory = "."
        if not isinstance(self.source_directory, (str, os.PathLike)):
            raise JobError(f"source_directory={self.source_directory!r} is not a path.")
        # Store an empty text as ".", because messages show the value. Both texts mean the working directory.
        self.source_directory = os.fspath(self.source_directory) or "."
        # Make the job now, so that a wrong value raises an error where the estimator is created, and not only at submission. Keep
        # the values, because a script may change them before it submits.
        self._made = self._values(), self._make_job()

    def job(self) -> Job:
        """Return the job, rebuilt if a value or a requirements file may have changed.

        Raises:
            JobError: A changed value is wrong, or a requirements file can't be read.
        """
        (before, job), now = self._made, self._values()
        # Build the job again if there is a requirements file, whose text may have changed since the job read it. Compare
        # lengths, because `map` stops at the shorter list.
        may_differ = self.pip_requirements_file or self.conda_dependencies_file or len(before) != len(now)
        # Compare by identity: `==` equates True, 1 and 1.0, which become different words for the script.
        if may_differ or not all(map(is_, before, now)):
            job = self._make_job()
            self._made = now, job
        return job

    def _values(self) -> list[Any]:
        """Return the estimator's values, with items of lists and dicts, for `job` to detect changes."""
        found: list[Any] = []
        for field in fields(self):
            value = getattr(self, field.name)
            found += [field.name, value]
            # A dict keeps its identity when an item is set, so list its items, too.
            if isinstance(value, Mapping):
                found += [*value, *value.values()]
            elif isinstance(value, Sequence) and not isinstance(value, str):
                found += value
        return found

    def _make_job(self) -> Job:
        if self.restart_on_exception and not self.max_restarts:
            raise JobError("restart_on_exception=True with max_restarts=0: say how often, such as max_restarts=3.")
        environment = described(
            definition=self.environment_definition,
            source_directory=self.source_directory or ".",
            # With an image, `python` is looked up on the image's PATH, which is unknown on this machine.
            python=interpreter(self.python) if self.custom_docker_image is None else _word(self.python),
            # Frameworks' estimators use the installed framework by default, which needs no download.
            layered=(self.framework is not None and not self.user_managed) if self.layered is None else self.layered,
            user_managed=self.user_managed,
            pip_packages=self.pip_packages,
            pip_requirements_file=self.pip_requirements_file,
            conda_packages=self.conda_packages,
            conda_channels=self.conda_channels,
            conda_dependencies_file=self.conda_dependencies_file,
            docker_image=self.custom_docker_image,
            shm_size=self.shm_size,
        )
        variables = self.environment_variables
        # The estimator's variables override its environment's variables. Leave a value that is not a mapping unchanged, because
        # the job's error message shows it.
        if variables is None or isinstance(variables, Mapping):
            variables = {**environment.environment_variables, **(variables or {})}
        values: dict[str, Any] = {
            **self._entry(),
            "framework": self.framework,
            "compute_target": _name_of(self.compute_target),
            "use_gpu": self.use_gpu,
            "gpu_visibility": self.gpu_visibility,
            "gpu_share": self.gpu_share,
            "priority": self.priority,
            "cores": self.cores,
            "environment": environment,
            "environment_variables": variables,
            "inputs": references(self.inputs, self.script_params, self.arguments or _listed(self.command)),
            "send": sent_names(self.send, self.source_directory or "."),
            "max_run_duration_seconds": _seconds("max_run_duration_seconds", self.max_run_duration_seconds),
            "grace_period_seconds": _seconds("grace_period_seconds", self.grace_period_seconds),
            "max_restarts": self.max_restarts,
            "on_failure": self.on_failure,
            "restart_on_exception": self.restart_on_exception,
            "log_limit": log_limit(self.log_limit),
            "notify": (self.notify,) if isinstance(self.notify, str) else self.notify or (),
            "notify_on": (self.notify_on,) if isinstance(self.notify_on, str) else self.notify_on,
            "hang_seconds": _seconds("hang_seconds", self.hang_seconds),
            "on_hang": self.on_hang,
            "warm": self.warm,
        }
        return Job(**(values | self._distribution()))

    def _entry(self) -> dict[str, object]:
        words = argument_words(self.script_params, self.arguments)
        if self.command is None:
            # Pass "" if there is no script: the job's error then asks for a script, unless there is a module.
            script = _word(self.entry_script or "")
            return {"entry_script": script, "entry_module": self.entry_module, "arguments": words}
        if self.entry_script or self.entry_module or words:
            raise JobError(
                f"command={self.command!r} together with a script, a module or arguments: the command line says it all."
            )
        return {"entry_script": "bash", "arguments": ("-c", command_line(self.command))}

    def _distribution(self) -> dict[str, object]:
        return {}


@dataclass
class _Distributed(_Script):
    """A script that may run as several processes.

    Args:
        node_count: Number of nodes, at least 1. (2, 4) makes an elastic run, which uses 2 to 4 nodes, as many as are available.
        process_count_per_node: Workers on each node, at least 1.
        distributed_backend: How the workers communicate: one of the class's `backends`. None: one process.
        elastic_seconds: Minimum seconds between two restarts of an elastic run for more nodes.
    """

    # The marker KW_ONLY applies to the fields of one class, so each subclass with fields repeats it.
    _: KW_ONLY
    node_count: int | tuple[int, int] = 1
    process_count_per_node: int = 1
    distributed_backend: Backend | None = None
    elastic_seconds: float = DEFAULT_ELASTIC_S

    def __post_init__(self) -> None:
        # Check the backend here: the job, which the base class creates, would accept "tensorflow" for PyTorch.
        backend = self.distributed_backend
        if backend is not None and backend not in self.backends:
            raise JobError(
                f"distributed_backend={backend!r} is not a backend of {type(self).__name__}, which has "
                f"{', '.join(map(repr, self.backends))}. Choose one of them, or None for one process."
            )
        super().__post_init__()

    def _distribution(self) -> dict[str, object]:
        return {
            "node_count": self.node_count,
            "process_count_per_node": self.process_count_per_node,
            "distributed_backend": self.distributed_backend,
            "elastic_seconds": _seconds("elastic_seconds", self.elastic_seconds),
        }


@dataclass
class Estimator(_Distributed):
    """An estimator for any Python script.

    Backends: "mpi", "gloo", "nccl", "tensorflow", or None for one process.

    Examples:
        >>> script = pl.Estimator(entry_script="train.py", script_params={"--lr": 0.1}, pip_packages=["einops"])
        >>> run = pl.Experiment(pl.Workspace("my_runs"), "digits").submit(script)  # doctest: +SKIP
    """

    backends: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl", "tensorflow")


@dataclass
class PyTorch(_Distributed):
    """An estimator for a PyTorch script.

    Backends: "mpi" (Open MPI), "gloo", "nccl" (with use_gpu=True), or None for one process.

    Examples:
        >>> script = pl.PyTorch(entry_script="train.py", node_count=2, distributed_backend="gloo", pip_packages=["einops"])
        >>> experiment = pl.Experiment(pl.Workspace("my_runs"), "digits")
        >>> run = experiment.submit(script)  # doctest: +SKIP
    """

    framework: ClassVar[str | None] = "pytorch"
    backends: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl")


@dataclass
class TensorFlow(_Distributed):
    """An estimator for a TensorFlow script.

    Backends: "mpi", "tensorflow" (`TF_CONFIG` with workers only), "ps" (with parameter servers), or None for one process.

    Args:
        worker_count: Number of workers with "ps", spread over `node_count` nodes.
        parameter_server_count: Number of parameter servers with "ps", spread over `node_count` nodes.

    Examples:
        >>> script = pl.TensorFlow(
        ...     entry_script="train.py", distributed_backend="ps", worker_count=2, parameter_server_count=1
        ... )
    """

    _: KW_ONLY
    worker_count: int = 1
    parameter_server_count: int = 1

    framework: ClassVar[str | None] = "tensorflow"
    backends: ClassVar[tuple[str, ...]] = ("mpi", "tensorflow", "ps")

    def _distribution(self) -> dict[str, object]:
        values = super()._distribution()
        if self.distributed_backend == "ps":
            return values | {"worker_count": self.worker_count, "parameter_server_count": self.parameter_server_count}
        # These two counts belong to the backend "ps". With another backend they ask for servers that would never start.
        if (self.worker_count, self.parameter_server_count) != (1, 1):
            raise JobError(
                f"worker_count={self.worker_count}, parameter_server_count={self.parameter_server_count} with "
                f"distributed_backend={self.distributed_backend!r}: these belong to 'ps'. "
                "Use node_count and process_count_per_node."
            )
        return values


@dataclass
class SKLearn(_Script):
    """An estimator for a scikit-learn script, which runs as one process.

    Examples:
        >>> script = pl.SKLearn(entry_script="train.py", script_params={"--C": 0.5})
        >>> script.entry_script
        'train.py'
    """

    framework: ClassVar[str | None] = "sklearn"


def argument_words(
    script_params: Mapping[str, object] | None, arguments: Sequence[Any] | None = None
) -> tuple[str, ...]:
    """Return the script's arguments: first `script_params`, then `arguments`.

    A value "" in `script_params` makes its name a flag. An empty string in `arguments` stays an argument.

    Raises:
        JobError: A parameter is not a dict or list, a name is not a string, or a value is not a string, number, path or
            data.
    """
    return (*_words_of_params(script_params), *_words_of_list(arguments))


def command_line(command: object) -> str:
    """Return the bash command line for a text or a list of words.

    A text or a single word stays unchanged. Otherwise, words are quoted, except `$NAME` and shell operators.

    Raises:
        JobError: `command` is neither a text nor a list, or a word is not a string, number, path or data.
    """
    if isinstance(command, str) and command.strip():
        return command
    words = _words_of_list(_listed(command))
    if not words:
        raise JobError(
            f"command={command!r} is not a command. Write it as for a shell: command='python train.py --epochs 5'."
        )
    # A list with a single text contains the whole command line, as in the Azure SDK.
    return words[0] if len(words) == 1 else " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word in ("&&", "||", "|", ";", ">", ">>", "<", "2>&1"):
        return word
    # Use double quotes for a word with a variable, which the shell then expands to one word.
    return f'"{word}"' if re.fullmatch(r"[\w\s@%+=:,./$(){}-]*\$[\w\s@%+=:,./$(){}-]*", word) else shlex.quote(word)


def _listed(command: object) -> Sequence[Any] | None:
    return command if isinstance(command, Sequence) and not isinstance(command, str) else None


def _words_of_params(script_params: object) -> list[str]:
    if script_params is None:
        return []
    if not isinstance(script_params, Mapping):
        raise JobError(f"script_params={script_params!r} is not a dict. Write it as {{'--epochs': 5}}.")
    words: list[str] = []
    for name, given in script_params.items():
        if not isinstance(name, str):
            raise JobError(f"script_params has the name {name!r}, which is not a string.")
        text = _word(given)
        if text is None:
            hint = ' For a bare flag write "".' if given is None else ""
            if isinstance(given, Sequence):
                hint = f" For several values write arguments=[{name!r}, ...], with each of them."
            raise JobError(f"script_params[{name!r}]={given!r} is not a string, a number, a path or data.{hint}")
        words += [word for word in (name, text) if word]
    return words


def _words_of_list(arguments: object) -> list[str]:
    if arguments is None:
        return []
    # Refuse str and bytes: both are sequences, but the loop below would take each letter or byte as one word.
    if isinstance(arguments, str):
        raise JobError(f"arguments={arguments!r} is not a list. Write it as {arguments.split()!r}.")
    if isinstance(arguments, bytes) or not isinstance(arguments, Sequence):
        raise JobError(f"arguments={arguments!r} is not a list. Write it as ['--epochs', 5]; a dict is script_params.")
    words: list[str] = []
    for number, given in enumerate(arguments):
        text = _word(given)
        if text is None:
            hint = "Leave it out."
            if given is not None:
                hint = "Write each word by itself, as in arguments=['--sizes', *sizes]."
            raise JobError(f"arguments[{number}]={given!r} is not a string, a number, a path or data. {hint}")
        words.append(text)
    return words


def _word(given: object) -> str | None:
    """Return a value as a script's argument, or None if its type is wrong."""
    value = _as_reference(given)
    if hasattr(value, "default_value"):
        # Use the default: a pipeline's parameter gets its own value when the pipeline is submitted.
        return _word(value.default_value)
    if isinstance(value, os.PathLike):
        # Use fsdecode, because a path object may return bytes, for a name that is not UTF-8.
        return os.fsdecode(value)
    # Test for Number, because numpy's int64 and float32 are neither int nor float.
    return str(value) if isinstance(value, (str, Number, DataReference)) else None


def _as_reference(value: Any) -> Any:
    """Return a dataset or datastore as a data reference, and other values unchanged."""
    # Look for the method instead of the class, because importing the class would load `paceline.data` in every program.
    return value.as_reference() if hasattr(value, "as_reference") else value


def sent_names(given: Any, source: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the paths of option `send` relative to the source folder. Keep links unresolved.

    Raises:
        JobError: `given` is a text instead of a list, or a path is outside the source folder.
    """
    if isinstance(given, (str, bytes)):
        raise JobError(f"send={given!r} is not a list of paths. Write send=[{given!r}].")
    top = os.path.realpath(source)
    names = []
    for path in given or ():
        absolute = os.path.normpath(os.path.join(top, os.fspath(path)))
        above = os.path.realpath(os.path.dirname(absolute))
        names.append(os.path.relpath(os.path.join(above, os.path.basename(absolute)), top))
        if names[-1].split(os.sep)[0] == "..":
            raise JobError(
                f"send={os.fspath(path)!r} lies outside {top!r}, the folder that is copied. Send it as an input: "
                f"--input NAME={os.fspath(path)} (inputs=)."
            )
    return tuple(names)


def log_limit(given: object) -> Any:
    """Convert a log limit such as "500MB" to bytes, None to 0.

    Raises:
        JobError: A text is not a size.
    """
    if not isinstance(given, str):
        return 0 if given is None else given
    try:
        return size_bytes(given)
    except ValueError as error:
        raise JobError(f"log_limit={given!r}: {error}") from None


def interpreter(python: str | os.PathLike[str] | None) -> str | None:
    """Return the absolute path of `python`, searched on PATH. None stays None.

    Raises:
        JobError: The interpreter is not found, or `python` is not a path.
    """
    if python is None:
        return None
    if not isinstance(python, (str, os.PathLike)) or not python:
        raise JobError(f"python={python!r} is not a path. Give the path of a Python interpreter, or None.")
    found = shutil.which(python)
    if found is None:
        raise JobError(f"python={python!r} can't be run: there is no such program. Give a Python interpreter's path.")
    # Don't resolve links: a virtual environment's interpreter is a link, whose path identifies the environment.
    return os.path.abspath(found)


def is_estimator(config: object) -> bool:
    """Return True for an instance of a concrete estimator class."""
    return isinstance(config, _Script)


def with_overrides(estimator: _Script, overrides: Mapping[str, Any]) -> _Script:
    """Return the estimator with some arguments, inputs or script_params replaced by `overrides`.

    Raises:
        JobError: Another value is overridden.
    """
    allowed = {"script_params", "arguments", "inputs"}
    if unknown := sorted(set(overrides) - allowed):
        raise JobError(f"submit can't override {', '.join(unknown)}; it can override {', '.join(sorted(allowed))}.")
    params = overrides.get("script_params")
    if isinstance(params, Mapping) and isinstance(estimator.script_params, Mapping):
        overrides = {**overrides, "script_params": {**estimator.script_params, **params}}
    # replace() calls the constructor, which checks the overrides. The user's estimator is unchanged.
    return replace(estimator, **overrides) if overrides else estimator


def references(inputs: object, script_params: object, arguments: object = None) -> tuple[DataReference, ...]:
    """Return a run's data references in `inputs`, `script_params` and `arguments`.

    Raises:
        JobError: `inputs` is not a list of data.
    """
    if inputs is None:
        inputs = ()
    if isinstance(inputs, (str, DataReference)) or not isinstance(inputs, Sequence):
        raise JobError(f"inputs={inputs!r} is not a list. Write it as [{inputs!r}].")
    # Keep values that are not references in the list, so that the job's error message names them.
    found = [_as_reference(value) for value in inputs]
    params = script_params.values() if isinstance(script_params, Mapping) else ()
    listed = arguments if isinstance(arguments, Sequence) else ()
    for value in map(_as_reference, (*params, *listed)):
        # Add each reference only once, although several arguments may contain it.
        if isinstance(value, DataReference) and value not in found:
            found.append(value)
    # Remove duplicates only if all values are references, because other values may not be hashable.
    return tuple(dict.fromkeys(found)) if all(isinstance(value, DataReference) for value in found) else tuple(found)


def _seconds(name: str, given: Any) -> Any:
    """Return a text or timedelta in seconds, and other values unchanged."""
    if not isinstance(given, (str, dt.timedelta)):
        return given
    try:
        return units.seconds(given)
    except ValueError as error:
        raise JobError(f"{name}={given!r}: {error}") from None


def _name_of(target: Any) -> Any:
    """Return the name of a target, and other values unchanged."""
    return "local" if target is None else getattr(target, "name", target)
