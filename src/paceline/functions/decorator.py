"""The decorator that makes a function of a module a job."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from paceline.functions.finding import check_function

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    from paceline.functions.function_run import FunctionRun, FunctionRuns
    from paceline.workspace import Workspace

    _P = ParamSpec("_P")
else:
    # At run time use a TypeVar, because typing_extensions may be missing: Generic accepts a TypeVar like a ParamSpec.
    _P = TypeVar("_P")
_R = TypeVar("_R")


class FunctionJob(Generic[_P, _R]):
    """A function with the decorator `paceline.job`, which can run as a job.

    A direct call runs the function in this process, as without the decorator.

    Args:
        function: The function of a module.
        options: The options of `paceline.job`.

    Examples:
        >>> from jobs import double  # doctest: +SKIP
        >>> double.submit(4).result()  # doctest: +SKIP
        8
    """

    __name__: str

    def __init__(self, function: Callable[_P, _R], options: dict[str, object]) -> None:
        self.function = function
        self._options = options
        functools.update_wrapper(self, function)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job {self.function.__module__}.{self.function.__name__}>"

    def options(self, **options: object) -> FunctionJob[_P, _R]:
        """Return the same function with other options, for one submission.

        Args:
            options: Options of `paceline.job`, which replace the decorator's options.
        """
        return FunctionJob(self.function, {**self._options, **options})

    def submit(self, *args: _P.args, **kwargs: _P.kwargs) -> FunctionRun[_R]:
        """Submit a call of the function, and return its run without waiting.

        Args:
            args: Arguments of the function.
            kwargs: Arguments of the function, by name.

        Raises:
            UserError: A worker can't import the function, an argument can't be sent, or an option is wrong. Nothing has
                been started.
        """
        from paceline.functions.submission import submit_call

        return submit_call(self.function, self._options, args, kwargs)

    def map(self, *values: Iterable[object], at_once: int | None = None, runs: int | None = None) -> FunctionRuns[_R]:
        """Submit a call for each value, and return the sequence of calls.

        On Slurm and Kubernetes, each call is a run, and all runs are one job array or one Job. On other targets, one
        run makes all calls, each in its own process.

        Args:
            values: One list of values for each argument, as for the built-in `map`.
            at_once: How many calls run at the same time. Default: all on Slurm and Kubernetes, else one per core.
            runs: Runs over which the calls are spread. Default: one per call on Slurm and Kubernetes, else 1.

        Raises:
            UserError: A worker can't import the function, an argument can't be sent, or the lists have different lengths.
        """
        from paceline.functions.submission import submit_map

        return submit_map(self.function, self._options, values, at_once, runs)


@overload
def job(function: Callable[_P, _R], /) -> FunctionJob[_P, _R]: ...
@overload
def job(
    function: None = None,
    /,
    *,
    nodes: int = 1,
    gpus: int = 0,
    processes: int | None = None,
    experiment: str | None = None,
    workspace: Workspace | str | os.PathLike[str] | None = None,
    source_directory: str | os.PathLike[str] | None = None,
    pickle: bool = False,
    max_result: int | str = "1GB",
    **options: object,
) -> Callable[[Callable[_P, _R]], FunctionJob[_P, _R]]: ...
def job(function: object = None, /, **options: object) -> object:
    """Make a function of a module a job, which runs on any compute target.

    `train.submit(lr=0.1)` returns a run with `result()` and `exception()`; `train.map(values)` calls the function for
    each value. The run gets a snapshot of the source, and imports the function's module from the snapshot. Arguments
    and results travel as JSON, and as safetensors if they contain arrays, tensors, tuples, sets or bytes.

    Args:
        function: The function. None if the decorator has parentheses.
        nodes: Number of nodes. Each process calls the function, and `result()` returns the result of rank 0.
        gpus: GPUs of each node, one for each process.
        processes: Processes on each node. Default: the value of `gpus`, but at least 1.
        experiment: Name of the experiment; default: the function's name.
        workspace: Workspace or its folder; default: the configured one.
        source_directory: Folder to copy; default: the folder from which Python imports the module.
        pickle: Send arguments and results as pickles, for values of any class. Paceline loads a pickle only from the run's
            own folder, and only if the file belongs to you.
        max_result: Largest result, in bytes or such as "2GB".
        options: Further values of an `Estimator`, such as compute_target, pip_packages, max_restarts.

    Raises:
        JobError: A worker can't import the function: it is a lambda, a method, a function inside a function, or a
            function of a notebook or prompt. Or the function is a generator or a coroutine.

    Examples:
        >>> @pl.job(nodes=2, gpus=1)  # doctest: +SKIP
        ... def double(x):
        ...     return 2 * x
    """
    if function is None:
        return functools.partial(_decorate, options)
    return _decorate(options, function)


def _decorate(options: dict[str, object], function: object) -> FunctionJob[..., object]:
    return FunctionJob(check_function(function), options)
