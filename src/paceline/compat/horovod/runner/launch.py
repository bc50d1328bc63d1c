"""The command `horovodrun`, and `_run` for launchers built on Horovod."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any

from paceline.compat.horovod.common import __version__, basics
from paceline.compat.horovod.runner import options as command_line
from paceline.compat.horovod.runner import requested_job, start
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import RankOutcome, why
from paceline.errors import PacelineError, RunFailedError, UserError
from paceline.system import processes


def run_commandline() -> None:
    """Run `horovodrun` with this process's arguments."""
    processes.become_subreaper()
    try:
        code = main(sys.argv[1:])
    finally:
        # Kill remaining descendants even if `main` has raised an exception, such as argparse's SystemExit or KeyboardInterrupt.
        processes.kill_descendants(os.getpid())
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run `horovodrun` with these arguments and return its exit code."""
    try:
        options = command_line.parse(argv)
        if options.version:
            print(__version__)
            return 0
        if options.check_build:
            print(build_text())
            return 0
        try:
            outcome = _driven(options)
        except BrokenPipeError:
            # The program that reads the output has ended (`horovodrun ... | head`). Let Python's final flush write to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
    except PacelineError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        # Use exit code 2 if the user has to change something, as argparse does, and 1 for any other error.
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        print(f"horovodrun: {error}. Is there room in {tempfile.gettempdir()} and /dev/shm?", file=sys.stderr)
        return 1
    return _ended(outcome)


def parse_args() -> Namespace:
    """Parse `horovodrun` options from this process's arguments, for a later `_run`."""
    return command_line.parse(sys.argv[1:])


def _run(args: Any) -> list[Any] | None:
    """Run the job that `args` describes. Return the results of `args.run_func`, None for a command."""
    # `parse_args` returns a Namespace with the attribute `np`. Other objects have Horovod's attribute `num_proc`: convert them.
    options = args if isinstance(args, Namespace) and hasattr(args, "np") else None
    if options is None:
        options = command_line.options(args, command_line.parse([]))
        if args.run_func is not None:
            from paceline.compat.horovod.runner.call import on_ranks

            return on_ranks(options, args.run_func, executable=args.executable)
    outcome = _driven(options)
    if outcome.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.stopped_by is not None:
        raise RunFailedError(f"the job was stopped by {signal.Signals(outcome.stopped_by).name}.")
    failed = why(outcome)
    if outcome.problem is not None or failed is not None:
        raise RunFailedError(outcome.problem or (failed or (0, 0, ""))[2])
    return None


def _driven(options: Namespace) -> RankOutcome:
    _check(options)
    for line in requested_job.without_meaning(options):
        print(f"horovodrun: without effect here: {line}.", file=sys.stderr)
    with closing(Output(folder=options.output_filename, timestamps=options.prefix_timestamp)) as output:
        return requested_job.run(options, output, options.command, {})


def _check(options: Namespace) -> None:
    """Raise an error for options without a command or `-np`, or with `--jsrun`."""
    if options.jsrun:
        raise UserError("--jsrun is not supported. Inside an LSF job, name the hosts with -H and leave --jsrun out.")
    if options.np is None:
        command_line.usage_error("-np N is missing: say how many processes to start.")
    if not options.command:
        command_line.usage_error(
            "there is no command: name the program that each process runs, as in `python train.py`."
        )


def _ended(outcome: RankOutcome) -> int:
    # After a signal, all ranks have exit codes, but none of them has failed. So check for a signal first.
    if outcome.stopped_by is not None:
        print(f"horovodrun: stopped by {signal.Signals(outcome.stopped_by).name}.", file=sys.stderr)
        return 128 + outcome.stopped_by
    if outcome.problem is not None:
        print(f"horovodrun: {outcome.problem}", file=sys.stderr)
        return 1
    failed = why(outcome)
    if failed is None:
        return 0
    print(f"horovodrun: {failed[2]}", file=sys.stderr)
    return failed[1]


def build_text() -> str:
    """Return the text of `horovodrun --check-build`: frameworks and transports, usable ones marked [X]."""
    from paceline import __version__ as own

    frameworks = {
        "TensorFlow": find_spec("tensorflow") is not None,
        "PyTorch": find_spec("torch") is not None,
        "MXNet": False,
    }
    transports = {"MPI": basics.mpi_built() and start.has_mpi(), "Gloo": basics.gloo_built()}
    # Use the words and brackets of Horovod's output, because programs search for this text.
    lines = [f"Horovod's interface of v{__version__}, from Paceline {own}:", "", "Available Frameworks:"]
    lines += [_line(*item) for item in frameworks.items()]
    lines += ["", "Available Controllers:", *(_line(*item) for item in transports.items())]
    operations = {"NCCL": _has_nccl(), "DDL": False, "CCL": False, **transports}
    lines += ["", "Available Tensor Operations:", *(_line(*item) for item in operations.items())]
    return "\n".join(lines)


def _line(name: str, is_there: bool) -> str:
    return f"    [{'X' if is_there else ' '}] {name}"


def _has_nccl() -> bool:
    try:
        import torch  # noqa: F401 - loaded for `nccl_built`
    except ImportError:
        return False
    return bool(basics.nccl_built())


if __name__ == "__main__":
    run_commandline()
