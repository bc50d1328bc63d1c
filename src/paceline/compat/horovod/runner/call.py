"""`horovod.run`: call a function on several ranks and return its results."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from paceline.errors import RunFailedError, UserError

_TASK = str(Path(__file__).with_name("task.py"))


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on ranks and return the results.

    The results are in rank order. Cloudpickle sends arguments and results, so functions of the main program or a
    notebook work. The ranks' output has a prefix. With min_num_proc or host_discovery_script the job is elastic, and
    the results come from the last attempt's ranks. Other arguments are options of `horovodrun`. network_interface and
    np are old names of network_interfaces and num_proc. disable_cache has no effect.

    Raises:
        RunFailedError: A rank failed or could not be started. The message has the rank and its traceback. `__cause__`
            is the rank's exception, if it could be sent. This error is also a RuntimeError.
        UserError: An argument is invalid, or func or its arguments cannot be pickled. This error is also a ValueError.
    """
    from paceline.compat.horovod.runner import options as command_line

    if network_interface is not None:
        warnings.warn("network_interface is the old name of network_interfaces.", DeprecationWarning, stacklevel=2)
    if np is not None:
        warnings.warn("np is the old name of num_proc.", DeprecationWarning, stacklevel=2)
    names = network_interfaces or network_interface or ()
    options = command_line.parse([])
    vars(options).update(
        np=np if num_proc is None else num_proc,
        min_np=min_num_proc or min_np,
        max_np=max_num_proc or max_np,
        slots=slots,
        reset_limit=reset_limit,
        blacklist_cooldown_range=cooldown_range,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        verbose=verbose,
        gloo=use_gloo,
        mpi=use_mpi,
        mpi_args=mpi_args,
        network_interfaces=names if isinstance(names, str) else ",".join(names),
    )
    return on_ranks(options, func, args, kwargs, executable)


def on_ranks(
    options: Namespace,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, object] | None = None,
    executable: str | None = None,
) -> list[Any]:
    """Call `func` on ranks and return the results, with the options of `horovodrun`."""
    from paceline.compat.horovod.runner import requested_job, wire
    from paceline.compat.horovod.runner.output import Output
    from paceline.compat.horovod.runner.rank_command import MAIN_SCRIPT
    from paceline.compat.horovod.runner.ranks import why

    if options.gloo and options.mpi:
        raise UserError("use_gloo=True and use_mpi=True: choose one of them.")
    if options.hosts is not None and options.hostfile is not None:
        raise UserError(f"hosts={options.hosts!r} and hostfile={options.hostfile!r}: give one of them.")
    options.np = 1 if options.np is None else options.np
    if not isinstance(options.np, int) or options.np < 1:
        raise UserError(f"num_proc={options.np!r} must be a whole number from 1 on.")
    files = {wire.CALL: _payload(func, args, dict(kwargs or {}))}
    # Write to sys.stdout: in a notebook it shows the output below the cell, but descriptor 1 may be the server's log.
    with closing(Output(folder=options.output_filename, to_streams=True)) as output:
        outcome = requested_job.run(
            options, output, (executable or sys.executable, MAIN_SCRIPT, _TASK), files, executable
        )
    # A handler received Ctrl-C while the job ran. Raise KeyboardInterrupt now, as Python does on Ctrl-C.
    if outcome.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.stopped_by is not None:
        # Raise the signal again. The handler from before the job now receives it, and usually ends this process.
        signal.raise_signal(outcome.stopped_by)
        raise RunFailedError(f"horovod.run was stopped by {signal.Signals(outcome.stopped_by).name}.")
    if outcome.problem is not None:
        raise RunFailedError(outcome.problem)
    failed = why(outcome)
    results = [_loaded(place.whole_files().get(wire.RESULT)) for place in outcome.ranks]
    if failed is not None:
        rank, _, sentence = failed
        failure = results[rank] or {}
        text = failure.get("traceback") or "\n".join(output.last_lines(rank))
        raise RunFailedError(f"horovod.run: {sentence}\n\n{text}".rstrip()) from failure.get("error")
    for rank, result in enumerate(results):
        if result is None:
            raise RunFailedError(f"horovod.run: rank {rank} left with exit code 0 before the function returned.")
    return [result["value"] for result in results]


def _payload(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, object]) -> bytes:
    if not callable(func):
        raise UserError(f"func={func!r} can't be called. Give the function itself, its arguments as args and kwargs.")
    # Refuse a string, because it is iterable, and each of its characters would become an argument.
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise UserError(f"args={args!r} is not a tuple of arguments. For a single one write args=({args!r},).")
    try:
        import cloudpickle
    except ImportError as error:
        raise UserError("horovod.run needs cloudpickle. Install it: pip install 'paceline[mpi]'.") from error
    try:
        call = cloudpickle.dumps((func, tuple(args), kwargs))
    except Exception as error:
        raise UserError(
            f"{getattr(func, '__name__', func)!r} or its arguments can't be sent to other processes: {error}. Create "
            "open files, locks and connections, which can't be pickled, inside the function."
        ) from error
    # The receiver sets its sys.path from `path` before it unpickles `call`, because it needs the function's module.
    return pickle.dumps({"path": [os.path.abspath(place) for place in sys.path], "call": call})


def _loaded(data: bytes | None) -> Any:
    """Unpickle a rank's value or error. Return None if the rank sent neither."""
    if data is None:
        return None
    # The result is a pickle inside a pickle. The outer pickle has only plain types, so this process can read the traceback even
    # if it can't import the class of the result or of the exception.
    content = pickle.loads(data)
    try:
        value = pickle.loads(content["value"])
    except Exception as error:
        if content["failed"]:
            return {"traceback": content["traceback"], "error": None}
        raise RunFailedError(
            f"horovod.run: a rank's result can't be read here: {type(error).__name__}: {error}."
        ) from error
    return {"traceback": content["traceback"], "error": value} if content["failed"] else {"value": value}
