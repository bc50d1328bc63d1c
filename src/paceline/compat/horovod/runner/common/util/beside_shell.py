"""Stands between a process and the command that it has started: run by file, so that it starts fast.

    python -S beside_shell.py <seconds of grace> <command> [argument ...]

The command ends by itself, or when standard input does: with whoever holds the other end.
"""

import os
import signal
import subprocess
import sys
import threading
import time


def main(grace_s: float, argv: "list[str]") -> int:
    """The command's exit code, 128+n where signal n has ended it. What is left of its process group goes with it."""
    # A group of its own, so that one signal reaches all that the command has started and that has stayed in the group.
    command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    told = threading.Event()

    def end() -> None:
        # It returns at the end of the input too, which the kernel brings about even where whoever held the other end was
        # killed.
        os.read(0, 1)
        told.set()
        deadline = time.monotonic() + grace_s
        _signal(command.pid, signal.SIGTERM)
        # Signal 0 only asks whether anything of the group is left.
        while _signal(command.pid, 0) and time.monotonic() < deadline:
            time.sleep(0.02)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    code = None
    while code is None and not (told.is_set() and not ending.is_alive()):
        # In short waits: when time is up, the command is killed from here.
        try:
            code = command.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    if told.is_set():
        ending.join()
    # After a normal end as well: what the command has left in the background holds the pipes of its output open.
    _signal(command.pid, signal.SIGKILL)
    code = command.wait()
    return code if code >= 0 else 128 - code


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    # macOS says EPERM where nothing but zombies is left of the group.
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
