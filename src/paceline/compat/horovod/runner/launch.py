"""The command `horovodrun`, and what it shares with `horovod.run`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner import launcher_arguments as arguments
from paceline.compat.horovod.runner import options as command_line
from paceline.compat.horovod.runner import settings, start
from paceline.compat.horovod.runner.driver import Driver, Job
from paceline.compat.horovod.runner.hosts import Slot
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import Outcome
from paceline.errors import PacelineError, RunFailedError, UserError
from paceline.system import processes

_START_TIMEOUT_S = 30.0
_ELASTIC = ("min_np", "max_np", "host_discovery_script", "slots", "elastic_timeout", "reset_limit")


def run_commandline() -> None:
    """`horovodrun` with this process's arguments. Leaves with 0, or the exit code of the first rank that failed."""
    # What a rank has started comes to this process if all between the two are killed.
    processes.become_subreaper()
    try:
        code = main(sys.argv[1:])
    finally:
        processes.kill_descendants(os.getpid())
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """The exit code of `horovodrun` with these arguments."""
    try:
        options = command_line.parse(argv)
        if options.version:
            from paceline.compat.horovod import __version__

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


def why(outcome: Outcome) -> tuple[int, int, str] | None:
    """(rank, exit code, sentence) of the rank that failed first; None where none did."""
    from paceline.supervisor.diagnosis.diagnose import WorkerEnd, first_failure, gone_before

    ends = [
        WorkerEnd(
            rank=rank,
            node=end.hello.get("host", end.host),
            exit_code=end.exit_code,
            error=end.error,
            ended_at=end.ended_at,
            stopped=end.stopped,
        )
        for rank, end in enumerate(outcome.ranks)
    ]
    first = first_failure(ends)
    if first is None:
        return None
    code = first.exit_code or int((first.error or {}).get("exit_code", 1))
    what = f"its process ended with exit code {code}"
    if first.signal:
        what = f"killed by {signal.Signals(first.signal).name}"
    if first.error is not None and first.error.get("type") != "SystemExit" and first.error.get("exception"):
        what = str(first.error["exception"])
    return first.rank, code, f"rank {first.rank} on {first.node} failed first: {what}{gone_before(first, ends)}"


def slots_of(np: int, hosts: str | None, hostfile: str | None) -> list[Slot]:
    """The place of each rank; without hosts, all on this machine.

    Raises:
        UserError: the hosts can't be read, are not known, or have too few slots.
    """
    named = host_lists.parse(hosts) if hosts else host_lists.read(hostfile) if hostfile else None
    return host_lists.slots(named or [host_lists.Host(name="localhost", slots=np)], np)


def transport_of(*, gloo: bool, mpi: bool) -> str:
    """ "mpi" or "gloo": as asked; unasked, MPI where there is one.

    Raises:
        UserError: there is neither.
    """
    if gloo or not (mpi or start.has_mpi()):
        from importlib.util import find_spec

        if not gloo and find_spec("torch") is None:
            raise UserError(
                "there is no Open MPI, and no torch with its Gloo, for the ranks to talk over. "
                "Install one: pip install 'paceline[mpi]'."
            )
        return "gloo"
    return "mpi"


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that ranks inherit: without what another launcher has set for this process alone."""
    from paceline.launchers.environment import inherited

    kept = inherited(environ)
    if "PACELINE_RUN_ID" not in environ and "PACELINE_WORKSPACE" in environ:
        kept["PACELINE_WORKSPACE"] = environ["PACELINE_WORKSPACE"]
    return kept


def start_timeout_s(given: float | None, environ: Mapping[str, str] = os.environ) -> float:
    """How long ranks may take to come up: as given, else as HOROVOD_START_TIMEOUT says."""
    text = environ.get("HOROVOD_START_TIMEOUT", "")
    if given is not None or not text:
        return _START_TIMEOUT_S if given is None else float(given)
    if not text.replace(".", "", 1).isdigit():
        raise UserError(f"HOROVOD_START_TIMEOUT={text!r} is no number of seconds. Unset it, or give one.")
    return float(text)


def refuse_elastic(*given: object) -> None:
    """Say what to do instead of an elastic job.

    Raises:
        UserError: any of these options was given.
    """
    if any(value is not None for value in given):
        raise UserError(
            "elastic jobs (--min-np, --max-np, --host-discovery-script and their settings) can't be had here: ranks neither "
            "join nor leave a running job. Start it with `paceline run --backend mpi --max-restarts 3`: the next attempt "
            "goes on from the script's checkpoints; or give -np alone."
        )


def _driven(options: Namespace) -> Outcome:
    """What came of the job that the options describe."""
    job = _job(options)
    for line in settings.without_meaning(options):
        print(f"horovodrun: without effect here: {line}.", file=sys.stderr)
    output = Output(len(job.slots), folder=options.output_filename, timestamps=options.prefix_timestamp)
    try:
        return Driver(job, output).run()
    finally:
        output.close()


def _function(args: Any, options: Namespace) -> list[Any]:
    from paceline.compat.horovod.runner.call import run

    refuse_elastic(*(getattr(options, name) for name in _ELASTIC), options.blacklist_cooldown_range)
    return run(
        args.run_func,
        num_proc=options.np,
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


def _job(options: Namespace) -> Job:
    refuse_elastic(*(getattr(options, name) for name in _ELASTIC), options.blacklist_cooldown_range)
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
    slots = slots_of(options.np, options.hosts, options.hostfile)
    return Job(
        argv=tuple(options.command),
        slots=tuple(slots),
        environment=environment_of(os.environ) | settings.variables(options),
        transport=transport_of(gloo=options.gloo, mpi=options.mpi),
        ssh=start.Ssh(port=options.ssh_port, identity_file=options.ssh_identity_file),
        start_timeout_s=start_timeout_s(options.start_timeout),
        interfaces=options.network_interfaces,
        mpi_args=options.mpi_args,
        binding_args=options.binding_args,
        tcp=options.tcp,
        verbose=options.verbose,
    )


def _ended(outcome: Outcome) -> int:
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
