"""Stands between a process and the command that it has started: run by file, so that it starts fast.

    python -S beside_shell.py <seconds of grace> <command> [argument ...]

The command ends by itself, or when standard input does: with whoever holds the other end.
"""

import os
import select
import signal
import subprocess
import sys
import time


def main(grace_s: float, argv: "list[str]") -> int:
    """The command's exit code, 128+n where signal n has ended it. What is left of its process group goes with it."""
    # Python writes into this pipe when a child ends, for there is a handler of SIGCHLD: so one wait is for both ends.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A thread that blocks signals hands that on to what it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    # A group of its own, so that one signal reaches all that the command has started and that has stayed in the group.
    command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    # The input ends, by the kernel's hand, even where whoever held its other end was killed.
    while command.poll() is None and 0 not in select.select([0, woken], [], [])[0]:
        os.read(woken, 1 << 10)
    if command.returncode is None:
        deadline = time.monotonic() + grace_s
        _signal(command.pid, signal.SIGTERM)
        # Signal 0 only asks whether anything of the group is left, and the command itself is until it is waited for.
        while _signal(command.pid, 0) and time.monotonic() < deadline:
            command.poll()
            time.sleep(0.02)
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
