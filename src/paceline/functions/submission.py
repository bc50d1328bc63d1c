"""Submission of functions: check the call, find the source folder, and start one run or several."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import JobError, UserError
from paceline.estimator import Estimator
from paceline.functions import calls, finding
from paceline.functions.calls import Call
from paceline.functions.function_run import FunctionRun, FunctionRuns
from paceline.job.data_reference import DataReference, Source
from paceline.job.job import Job
from paceline.runs.folder import RunFolder
from paceline.runs.ids import new_run_id, plain_experiment_name
from paceline.submit import NewRun, SourceCopy, prepare, submit, unrecorded, values_of
from paceline.system.detached_process import library_dir
from paceline.system.names import did_you_mean
from paceline.system.processes import core_count
from paceline.system.units import size_bytes
from paceline.targets import configured, supervisors
from paceline.targets.base import ALIKE_SPAN, Alike
from paceline.workspace import Experiment, Workspace

_R = TypeVar("_R")

#: Maximum number of calls of one `map`. The limit is for an endless iterable, whose submission would never end.
_MOST_CALLS = 100_000
#: Parameters of an estimator -> the options of `paceline.job` that replace them.
_NAMES = {"use_gpu": "gpus", "node_count": "nodes", "process_count_per_node": "processes"}
#: Parameters of an estimator that `paceline.job` refuses, because Paceline sets them for a function.
_OWN = {"entry_script", "entry_module", "command", "script_params", "arguments", "inputs", "gpu_visibility", *_NAMES}
_INPUT = "calls"
#: Number of calls that this program has submitted.
_submitted = 0


@dataclass(frozen=True, kw_only=True)
class FunctionOptions:
    """Options of `paceline.job`. `of_estimator` has further options, passed to `Estimator`."""

    nodes: int = 1
    gpus: int = 0
    processes: int | None = None
    experiment: str | None = None
    workspace: Workspace | str | os.PathLike[str] | None = None
    source_directory: str | os.PathLike[str] | None = None
    pickle: bool = False
    max_result: int | str = "1GB"
    of_estimator: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "processes"):
            value, least = getattr(self, name), int(name != "gpus")
            if name == "processes" and value is None:
                continue
            if type(value) is not int or value < least:
                raise JobError(f"@paceline.job({name}={value!r}): write an integer of {least} or more.")
        if self.gpus and self.processes not in (None, self.gpus):
            raise JobError(
                f"@paceline.job(gpus={self.gpus}, processes={self.processes}): each process has one GPU of its node. Write "
                "gpus=, or the same number for both."
            )
        if not isinstance(self.pickle, bool):
            raise JobError(f"@paceline.job(pickle={self.pickle!r}) is not a bool. Write True or False.")
        if self.limit < 1:
            raise JobError(f"@paceline.job(max_result={self.max_result!r}): write a size above 0, such as '1GB'.")

    @property
    def limit(self) -> int:
        try:
            return size_bytes(self.max_result) if isinstance(self.max_result, str) else int(self.max_result)
        except (ValueError, TypeError) as error:
            raise JobError(f"@paceline.job(max_result={self.max_result!r}): {error}") from None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> FunctionOptions:
        own = {field.name for field in dataclasses.fields(cls)} - {"of_estimator"}
        further = {field.name for field in dataclasses.fields(Estimator) if field.init} - own - _OWN
        if unknown := sorted(set(options) - own - further):
            near = did_you_mean(_NAMES.get(unknown[0], unknown[0]), [*own, *further])
            raise JobError(
                f"@paceline.job has no option {unknown[0]!r}.{near} It has those of Estimator, and {', '.join(sorted(own))}."
            )
        rest = {name: value for name, value in options.items() if name not in own}
        return cls(**{name: value for name, value in options.items() if name in own}, of_estimator=rest)


@dataclass(frozen=True, kw_only=True)
class PreparedFunction:
    """A function ready to submit: its options, source folder, and a job without arguments."""

    name: str
    signature: inspect.Signature
    options: FunctionOptions
    workspace: Workspace
    experiment: str
    source: Path
    job: Job
    function: str

    def call(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
        """Return the call to store: the arguments, by name if possible.

        Raises:
            JobError: The function does not take these arguments, or an argument can't be sent.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise JobError(f"{self.name}(): {error}. Its parameters are {self.signature}.") from None
        by_place = [*bound.args] if any(_is_by_place(one) for one in self.signature.parameters.values()) else []
        by_name = (
            bound.kwargs
            if by_place
            else {**dict(zip(self.signature.parameters, bound.args, strict=False)), **bound.kwargs}
        )
        numbered = {f"number {number}": value for number, value in enumerate(by_place, start=1)}
        for name, value in {**numbered, **by_name}.items():
            calls.check_sendable(f"{self.name}(): the argument {name}", value, pickled=self.options.pickle)
        return by_place, by_name

    def run(self, run_id: str, given: Call | list[Call], at_once: int = 0) -> NewRun:
        """Return the run to submit for a call or a list of calls.

        at_once: How many calls of a list to make at the same time; 0 for the node's cores.
        """
        own = self.options
        words = [*(["--pickle"] if own.pickle else []), "--limit", str(own.limit)]
        short = calls.words_of(given) if isinstance(given, tuple) and not own.pickle else None
        job, fill = self.job, None
        if short is None:
            folder = RunFolder(self.workspace.runs_dir / run_id).call
            reference = DataReference(name=_INPUT, sources=(Source(path=str(folder)),))
            words += ["--calls", str(reference)]
            job = dataclasses.replace(job, inputs=(*job.inputs, reference))
            stored = [_stored(one) for one in given] if isinstance(given, list) else _stored(given)

            def fill(hidden: RunFolder) -> None:
                hidden.call.mkdir(mode=0o700 if own.pickle else 0o777)
                calls.store(hidden.call, calls.CALLS, f"the arguments of {self.name}()", stored, pickled=own.pickle)

        words += ["--at-once", str(at_once)] if isinstance(given, list) else []
        job = dataclasses.replace(job, arguments=(*words, self.function, *(short or ())))
        job, values = unrecorded(job, {})
        return NewRun(run_id=run_id, job=job, secrets=values_of(job, values), fill=fill)


def _stored(call: Call) -> dict[str, object]:
    return {"args": list(call[0]), "kwargs": dict(call[1])}


def _is_by_place(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)


def prepared(given_function: Callable[..., object], options: Mapping[str, object]) -> PreparedFunction:
    """Check a function and its options, and return them ready to submit.

    Raises:
        UserError: A worker can't import the function, or an option is wrong.
    """
    function = finding.check_function(given_function)
    name = function.__name__
    if finding.loading is not None:
        raise JobError(
            f"{name} is submitted while a worker imports {finding.loading!r} to find its function, so each run would submit "
            "another. Move the call below `if __name__ == '__main__':`."
        )
    module, top = _place_of(function.__module__, name)
    main = sys.modules[function.__module__]
    if getattr(bound := getattr(main, name, None), "function", bound) is not function:
        raise JobError(
            f"{function.__module__} has another {name!r} than this function, which a worker would call. Rename one of them."
        )
    own = FunctionOptions.of(options)
    source = Path(own.source_directory or top).absolute()
    inside = os.path.relpath(os.path.realpath(top), os.path.realpath(source))
    if inside.split(os.sep)[0] == "..":
        raise JobError(
            f"source_directory={str(source)!r} does not contain {str(top)!r}, from where {name} is imported. Name a "
            "folder above it."
        )
    processes = own.processes or max(1, own.gpus)
    given: dict[str, Any] = {"layered": True, **own.of_estimator}
    if own.nodes * processes > 1:
        given.setdefault("distributed_backend", "nccl" if own.gpus else "gloo")
    job = Estimator(
        source,
        entry_module="paceline.functions",
        node_count=own.nodes,
        process_count_per_node=processes,
        use_gpu=own.gpus > 0,
        **given,
    ).job()
    if inside != ".":
        job = dataclasses.replace(job, working_directory=inside)
    workspace = own.workspace if isinstance(own.workspace, Workspace) else None
    if workspace is None:
        workspace = Workspace.from_config() if own.workspace is None else Workspace(own.workspace)  # type: ignore[arg-type]
    return PreparedFunction(
        name=name,
        signature=inspect.signature(function),
        options=own,
        workspace=workspace,
        experiment=own.experiment or plain_experiment_name(name),
        source=source,
        job=job,
        function=f"{module}:{name}",
    )


def _place_of(module: str, name: str) -> tuple[str, Path]:
    """Return a module's importable name, and the folder to add to sys.path.

    Raises:
        JobError: Workers can't import the module, or it is installed. The message has `name`, the function's name.
    """
    found = sys.modules[module]
    file = finding.main_file() if module == "__main__" else getattr(found, "__file__", None)
    spec = getattr(found, "__spec__", None)
    if module == "__main__" and file:
        # After `python -m package.train`, `__spec__` has the module's name. After `python train.py`, it is None.
        module = spec.name if spec is not None else Path(file).stem
    if file is None or not file.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        raise JobError(
            f"{name} is in {file or module!r}, which a worker can't import: write it to a module, a .py file with a plain name."
        )
    path = Path(os.path.abspath(file))
    depth = module.count(".") + (path.name == "__init__.py")
    top = path.parents[depth]
    installed = {os.path.realpath(sysconfig.get_path(key)) for key in ("purelib", "platlib", "stdlib")}
    if os.path.realpath(top) in installed:
        raise JobError(
            f"{name} is in the installed package {module.partition('.')[0]!r}, whose source no snapshot has. Call it from a "
            "function of your own module, and submit that function."
        )
    return module, top


@contextlib.contextmanager
def _options_in_errors() -> Iterator[None]:
    """Replace the estimator's parameters in error messages by the options of `paceline.job`."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("use_gpu=True", "gpus=").replace("use_gpu=False", "gpus=0")
        error.args = (re.sub(rf"\b({'|'.join(_NAMES)})=", lambda found: f"{_NAMES[found[1]]}=", text), *error.args[1:])
        raise


@_options_in_errors()
def submit_call(
    given_function: Callable[..., _R],
    options: Mapping[str, object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> FunctionRun[_R]:
    """Submit one call of a function, and return its run."""
    global _submitted
    known = prepared(given_function, options)
    run = known.run(new_run_id(known.experiment), known.call(args, kwargs))
    submit(
        run.job,
        SourceCopy(directory=known.source),
        known.workspace.path,
        known.experiment,
        run_id=run.run_id,
        fill=run.fill,
    )
    _submitted += 1
    # A program that has submitted two calls will probably submit a third one: load the supervisor for it in advance.
    if _submitted > 1 and known.job.compute_target == configured.LOCAL:
        supervisors.load_ahead(library_dir(known.workspace.path), sys.executable, supervisors.FOR_THIS_MACHINE)
    return FunctionRun(Experiment(known.workspace, known.experiment), run.run_id)


@_options_in_errors()
def submit_map(
    given_function: Callable[..., _R],
    options: Mapping[str, object],
    values: Sequence[Iterable[object]],
    at_once: int | None,
    runs: int | None,
) -> FunctionRuns[_R]:
    """Submit a function call for each value, and return the runs."""
    known = prepared(given_function, options)
    given = _calls(known, values)
    for name, value in (("at_once", at_once), ("runs", runs)):
        if value is not None and (type(value) is not int or value < 1):
            raise JobError(f"map({name}={value!r}) is not an integer of 1 or more.")
    described = configured.read(known.workspace.path, known.job.compute_target)
    target = described.make()
    is_array = isinstance(target, Alike)
    count = min(runs or (len(given) if is_array else 1), len(given))
    if is_array and count > ALIKE_SPAN:
        raise JobError(
            f"map() of {count:,} calls makes a job array of as many runs; an array has at most {ALIKE_SPAN:,}. Write "
            f"runs={ALIKE_SPAN // 10}, and each run makes several calls."
        )
    if isinstance(target, Alike) and count > 1:
        target.check_alike(known.job)
    is_pool = count < len(given) or not is_array
    if is_pool and (known.options.nodes > 1 or known.job.world_size > max(1, known.options.gpus)):
        raise JobError(
            f"map() of {known.name}, each call on {known.job.size_text} processes: on a target of kind {described.kind} one "
            f"run makes all calls, with one process each. Submit each call: [{known.name}.submit(value) for value in values]."
        )
    each = 0
    if is_pool:
        if known.options.gpus > 1:
            raise JobError(
                f"map() of {known.name} with gpus={known.options.gpus}: a call has one process. Write gpus=1 and at_once=."
            )
        each, known = _sized(known, described.kind == configured.LOCAL, at_once, count, len(given))
    name = new_run_id(known.experiment)
    new = [
        known.run(f"{name}_{number}" if count > 1 else name, given[number::count] if is_pool else given[number], each)
        for number in range(count)
    ]
    submission = prepare(new[0].job, SourceCopy(directory=known.source), known.workspace.path, known.experiment)
    if is_array:
        submission.start_alike(new, at_once or count)
    else:
        for run in new:
            submission.start(run)
    experiment = Experiment(known.workspace, known.experiment)
    return FunctionRuns([FunctionRun(experiment, run.run_id) for run in new], len(given), is_pool=is_pool)


def _calls(known: PreparedFunction, values: Sequence[Iterable[object]]) -> list[Call]:
    lengths = {len(one) for one in values if isinstance(one, Sized)}
    if len(lengths) > 1:
        raise JobError(
            f"map() of {known.name} with lists of {sorted(lengths)} values: give as many values for each argument."
        )
    given: list[Call] = []
    for args in zip(*values, strict=False):
        given.append(known.call(args, {}))
        if len(given) > _MOST_CALLS:
            raise JobError(f"map() of {known.name}: more than {_MOST_CALLS:,} values. Give several to each call.")
    if not given:
        raise JobError(f"map() of {known.name} without any value. Give at least one.")
    return given


def _sized(
    known: PreparedFunction, is_here: bool, at_once: int | None, runs: int, number: int
) -> tuple[int, PreparedFunction]:
    """Return how many calls each run makes in parallel (0: one per core), and `known` sized for them."""
    if at_once is None and known.options.gpus:
        raise JobError(f"map() of {known.name} with gpus=1: write at_once=, the number of GPUs to use.")
    # A result of 0 means that as many calls run at a time as the node has cores.
    each = min(-(-at_once // runs), -(-number // runs)) if at_once is not None else 0
    job = known.job
    if known.options.gpus and each > 1:
        backend = job.distributed_backend or "gloo"
        job = dataclasses.replace(job, process_count_per_node=each, distributed_backend=backend, gpu_visibility="node")
    elif is_here and not known.options.gpus and job.cores:
        job = dataclasses.replace(job, cores=job.cores * (each or min(core_count(), number)))
    return each, dataclasses.replace(known, job=job)
