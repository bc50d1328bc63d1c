"""`horovod.runner`: `horovod.run` and the command `horovodrun`. Imports only the standard library.

    launch         the command, and `_run` for launchers built on Horovod
    call           functions for `horovod.run`
    options        the command line, the file of `--config-file`, `_HorovodArgs`
    requested_job  builds a job from its options and runs it to its end
    hosts          hosts and slots, the place of each rank, host discovery
    start          mpirun's command line, or plain processes
    driver         one job: start, watch, end              elastic_driver   attempts of an elastic job
    rank           the parent process of each rank         wire             its connection to the driver
    output         the ranks' lines with their prefixes    ranks            results and variables of ranks
    common/, util/ modules that launchers and helpers built on Horovod import

The job is not a Paceline run: Paceline copies no source and records nothing (docs/horovodrun.md).
"""

from __future__ import annotations

from typing import Any

from paceline.compat.horovod.runner.options import _HorovodArgs as _HorovodArgs

__all__ = ["run", "run_commandline"]


def run(*args: Any, **kwargs: Any) -> list[Any]:
    """Run a function on several ranks and return its results."""
    from paceline.compat.horovod.runner.call import run as run_function

    return run_function(*args, **kwargs)


def run_commandline() -> None:
    """Run the command `horovodrun`."""
    from paceline.compat.horovod.runner.launch import run_commandline as command

    command()
