"""The command `horovodrun`, and what it shares with `horovod.run`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from paceline.compat.horovod._version import __version__
from paceline.compat.horovod.runner import launcher_arguments as arguments
from paceline.compat.horovod.runner import options as command_line
from paceline.compat.horovod.runner import settings
from paceline.compat.horovod.runner.asked_elastic import elastic_hosts, elastic_limits
from paceline.compat.horovod.runner.asked_job import (
    environment_of,
    has_torch,
    slots_of,
    start_timeout_s,
    transport_of,
    why,
)
from paceline.compat.horovod.runner.driver import RanksDriver
from paceline.compat.horovod.runner.elastic_driver import ElasticDriver, ElasticLimits
from paceline.compat.horovod.runner.hosts import Slot
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import RankOutcome
from paceline.compat.horovod.runner.start import RanksJob
from paceline.errors import PacelineError, RunFailedError, UserError
from paceline.system import processes


def run_commandline() -> None:
    """`horovodrun` with this process's arguments. Leaves with 0, or the exit code of the first rank that failed."""
    # What a rank has started comes to this process if all between the two are killed.
    processes.become_subreaper()
    try:
        code = main(sys.argv[1:])
    finally:
        # Also where argparse leaves by SystemExit, or `main` by KeyboardInterrupt.
        processes.kill_descendants(os.getpid())
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """The exit code of `horovodrun` with these arguments."""
    try:
        options = command_line.parse(argv)
        if options.version:
            print(__version__)
            return 0
        if options.check_build:
            from paceline.compat.horovod.runner.check_build import text

            print(text())
            return 0
        try:
            outcome = _driven(options)
        except BrokenPipeError:
            # Nobody reads any more: `horovodrun ... | head`. What Python would still flush would fail as well.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
    except PacelineError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        # 2, which is argparse's code as well, for what the caller has to change; 1 for everything else.
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        print(f"horovodrun: {error}. Is there room in {tempfile.gettempdir()} and /dev/shm?", file=sys.stderr)
        return 1
    return _ended(outcome)


def parse_args() -> Namespace:
    """The options that this process was given, for `_run`; a launcher of its own may change them in between."""
    return command_line.parse(sys.argv[1:])


def _run(args: Any) -> list[Any] | None:
    """Run a job that a launcher built on Horovod has put together: `_HorovodArgs`, or what `parse_args` gives.

    The results of `run_func` on the ranks, where there is one; else None.

    Raises:
        RunFailedError: a rank failed, or could not be started; the message says which, and why. Also a RuntimeError.
        UserError: the job can't be run as it is. Also a ValueError.
    """
    # What `parse_args` gives has `np`. An object of the caller's own has Horovod's attribute `num_proc`.
    options = args if isinstance(args, Namespace) and hasattr(args, "np") else None
    if options is None:
        options = arguments.options(args, command_line.parse([]))
        if args.run_func is not None:
            return _function(args, options)
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
    """Run the job that the options describe, and return its outcome."""
    limits = _checked(options)
    job = None if limits is not None else _job(options, slots_of(options.np, options.hosts, options.hostfile))
    for line in settings.without_meaning(options):
        print(f"horovodrun: without effect here: {line}.", file=sys.stderr)
    ranks = 0 if job is None else len(job.slots)
    output = Output(ranks, folder=options.output_filename, timestamps=options.prefix_timestamp)
    try:
        if job is not None:
            return RanksDriver(job, output).run()
        assert limits is not None
        watch = elastic_hosts(options, options.np)
        try:
            return ElasticDriver(lambda slots: _job(options, slots), output, watch, limits).run()
        finally:
            watch.close()
    finally:
        output.close()


def _function(args: Any, options: Namespace) -> list[Any]:
    from paceline.compat.horovod.runner.call import run

    return run(
        args.run_func,
        num_proc=options.np,
        min_num_proc=options.min_np,
        max_num_proc=options.max_np,
        slots=options.slots,
        reset_limit=options.reset_limit,
        cooldown_range=options.blacklist_cooldown_range,
        host_discovery_script=options.host_discovery_script,
        hosts=options.hosts,
        hostfile=options.hostfile,
        start_timeout=options.start_timeout,
        ssh_port=options.ssh_port,
        ssh_identity_file=options.ssh_identity_file,
        output_filename=options.output_filename,
        verbose=options.verbose,
        use_gloo=options.gloo,
        use_mpi=options.mpi,
        mpi_args=options.mpi_args,
        network_interfaces=options.network_interfaces,
        executable=args.executable,
    )


def _checked(options: Namespace) -> ElasticLimits | None:
    """What is said of an elastic job, once the options are looked at.

    Raises:
        UserError: the job can't be run as it is.
    """
    if options.jsrun:
        raise UserError("--jsrun is not supported. Inside an LSF job, name the hosts with -H and leave --jsrun out.")
    if options.np is None:
        command_line.usage_error("-np N is missing: say how many processes to start.")
    if not options.command:
        command_line.usage_error(
            "there is no command: name the program that each process runs, as in `python train.py`."
        )
    if options.ssh_identity_file and not os.path.isfile(options.ssh_identity_file):
        raise UserError(f"--ssh-identity-file {options.ssh_identity_file!r} is no file. Name the private key.")
    return elastic_limits(options, options.np)


def _job(options: Namespace, slots: Sequence[Slot]) -> RanksJob:
    is_elastic = elastic_limits(options, options.np) is not None
    return RanksJob(
        argv=tuple(options.command),
        slots=tuple(slots),
        environment=environment_of(os.environ) | settings.variables(options),
        # Where a host is lost, mpirun ends all ranks, and what they have committed with them.
        transport=transport_of(gloo=options.gloo or (is_elastic and not options.mpi and has_torch()), mpi=options.mpi),
        ssh_port=options.ssh_port,
        ssh_identity_file=options.ssh_identity_file,
        start_timeout_s=start_timeout_s(options.start_timeout),
        interfaces=options.network_interfaces,
        mpi_args=options.mpi_args,
        binding_args=options.binding_args,
        tcp=options.tcp,
        verbose=options.verbose,
    )


def _ended(outcome: RankOutcome) -> int:
    # First of all: ranks that were stopped have exit codes too, which are no failure of theirs.
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


if __name__ == "__main__":
    run_commandline()
