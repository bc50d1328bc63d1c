"""Lets others see where this worker stands, without its help: its stacks on a signal, and the collectives that it is in.

    <PACELINE_WATCH_DIR>/stacks_<rank>    what faulthandler writes at each such signal
    <PACELINE_WATCH_DIR>/worker_<rank>    the signal's number, this process's, and the descriptor by which it has that file open
    <PACELINE_WATCH_DIR>/board_<rank>     `paceline.system.collective_state`, once there is a collective
    <PACELINE_WATCH_DIR>/ask_<rank>       `paceline.collectives.recorder`, once there is a process group of torch's
    <PACELINE_WATCH_DIR>/steps_<rank>     `paceline.system.step_clock`

The signal is SIGURG: what has no handler for it does not notice, such as a program that the script turns into. faulthandler
answers in its own signal handler, in C, so that a main thread in native code, or one that waits for a lock, answers as well.
A script that sets a handler of its own for SIGURG has it, and gives these stacks up; PACELINE_STACKS_SIGNAL names another signal.
"""

from __future__ import annotations

import os

#: Of another signal for the stacks: its name or number; "0" for none.
SIGNAL_VARIABLE = "PACELINE_STACKS_SIGNAL"

#: Descriptors from here on: a script that closes all that it does not know of, or counts on the lowest, meets none of these.
_FIRST_FD = 200


def begin(kind: str = "script") -> None:
    """Answer from now on, where whoever has started this worker wants to know. No failure of it is one of the worker's."""
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
    from paceline.collectives import step_hooks

    step_hooks.install()
    if os.environ.get("PACELINE_WORLD_SIZE", "1") != "1":
        from paceline.collectives import recorder

        recorder.answer_when_loaded(os.path.join(folder, f"ask_{rank}"))


def _answer(folder: str, rank: str, number: int) -> None:
    if not number:
        # Its number stays the same when it turns into a program: what the kernel tells of it is known all the same.
        _tell(folder, rank, f"0 {os.getpid()} -1")
        return
    import faulthandler
    import fcntl

    path = os.path.join(folder, f"stacks_{rank}")
    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Kept over a fork, so that a data loader's worker answers into the same file; closed by an exec.
        file = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    except OSError:
        file = os.dup(low)
    os.close(low)
    # The thread that gets the signal tells of itself alone. To tell of all, it would read the stacks of threads that run
    # meanwhile, and that ends in a segmentation fault now and then. Each is sent the signal in its turn.
    faulthandler.register(number, file=file, all_threads=False)
    # Last: who finds it may send the signal.
    _tell(folder, rank, f"{number} {os.getpid()} {file}")


def _tell(folder: str, rank: str, text: str) -> None:
    with open(os.path.join(folder, f"worker_{rank}"), "w") as told:
        told.write(text)


def _signal() -> int:
    # Not `signal`, which loads `enum`: that is time before the script's first line.
    import _signal  # type: ignore[import-not-found,unused-ignore]

    told = os.environ.get(SIGNAL_VARIABLE, "SIGURG")
    if told.isdigit():
        return int(told)
    return int(getattr(_signal, told if told.startswith("SIG") else f"SIG{told}", 0))
