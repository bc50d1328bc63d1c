"""Expose a worker's state without its help: its stacks on a signal, its collectives and its steps.

    <PACELINE_WATCH_DIR>/stacks_<rank>    faulthandler's output for each signal
    <PACELINE_WATCH_DIR>/worker_<rank>    the signal's number, the pid, and the descriptor of the file for the stacks
    <PACELINE_WATCH_DIR>/board_<rank>     running collectives (`paceline.system.collective_state`), once there are any
    <PACELINE_WATCH_DIR>/ask_<rank>       requests to torch's flight recorder (`paceline.collectives.recorder`)
    <PACELINE_WATCH_DIR>/steps_<rank>     the steps' times (`paceline.system.step_clock`)

The signal is SIGURG, because a program without a handler ignores it, such as a program that replaces the script by
exec. faulthandler runs in its C signal handler, so it also works while the main thread is in native code or waits for a
lock. If a script handles SIGURG itself, there are no stacks; PACELINE_STACKS_SIGNAL selects another signal.
"""

from __future__ import annotations

import os

#: Variable with the name or number of the signal to use for stack dumps. "0" switches stack dumps off.
SIGNAL_VARIABLE = "PACELINE_STACKS_SIGNAL"

#: Lowest number for this module's file descriptors. A script may close low numbers, or rely on the lowest free one.
_FIRST_FD = 200


def begin(kind: str = "script") -> None:
    """Let other processes read this worker's stacks and steps if PACELINE_WATCH_DIR is set."""
    folder, rank = os.environ.get("PACELINE_WATCH_DIR"), os.environ.get("PACELINE_RANK")
    if not folder or not rank:
        return
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        _answer(folder, rank, _signal() if kind != "program" else 0)
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError):
        pass
    if kind == "program":
        return
    from paceline.collectives import count_steps

    count_steps()
    if os.environ.get("PACELINE_WORLD_SIZE", "1") != "1":
        from paceline.collectives import answer_recorder_requests

        answer_recorder_requests(os.path.join(folder, f"ask_{rank}"))


def _answer(folder: str, rank: str, number: int) -> None:
    if not number:
        # Without a signal, workers can't write their stacks. Report the pid, so that readers can get the kernel's data on it.
        _tell(folder, rank, f"0 {os.getpid()} -1")
        return
    import faulthandler
    import fcntl

    path = os.path.join(folder, f"stacks_{rank}")
    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Forked processes, such as a data loader's, write their stacks into this file too. exec closes it.
        file = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    except OSError:
        file = os.dup(low)
    os.close(low)
    # Let only the signaled thread print its stack: printing the stacks of other running threads occasionally crashes. So
    # `paceline.observe.node.look` signals each thread in turn.
    faulthandler.register(number, file=file, all_threads=False)
    # Write this file last: once it exists, its readers may send the signal.
    _tell(folder, rank, f"{number} {os.getpid()} {file}")


def _tell(folder: str, rank: str, text: str) -> None:
    with open(os.path.join(folder, f"worker_{rank}"), "w") as told:
        told.write(text)


def _signal() -> int:
    # Don't import `signal`, which loads `enum` and delays the script's first line.
    import _signal  # type: ignore[import-not-found,unused-ignore]

    told = os.environ.get(SIGNAL_VARIABLE, "SIGURG")
    if told.isdecimal():
        return int(told)
    return int(getattr(_signal, told if told.startswith("SIG") else f"SIG{told}", 0))
