"""`horovod.runner`: `horovod.run`, and the command `horovodrun`. Standard library alone at import.

    options    the command line and the file of `--config-file`      settings   options as the engine's variables
    hosts      hosts and slots, the place of each rank               start      mpirun's command line, or plain processes
    driver     one job: start, watch, end                            output     the ranks' lines, with their prefixes
    rank       beside each rank; kills it when the driver is gone    wire       the line between the two
    call       functions for `horovod.run`                           launch     the command itself
    launcher_arguments, common/, util/                               what launchers and helpers built on Horovod import

No run of Paceline's is made: nothing is copied, nothing recorded (docs/horovodrun.md).
"""

from __future__ import annotations

from typing import Any

from paceline.compat.horovod.runner.options import _HorovodArgs as _HorovodArgs

__all__ = ["run", "run_commandline"]


def run(*args: Any, **kwargs: Any) -> list[Any]:
    """The results of a function on several ranks, in order of rank; see `call.run`."""
    from paceline.compat.horovod.runner.call import run as run_function

    return run_function(*args, **kwargs)


def run_commandline() -> None:
    """The command `horovodrun`."""
    from paceline.compat.horovod.runner.launch import run_commandline as command

    command()
