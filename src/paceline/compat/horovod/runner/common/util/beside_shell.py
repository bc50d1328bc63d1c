"""A process between `execute` and its command, run by path so that it starts fast.

    python -S beside_shell.py <seconds of grace> <command> [argument ...]

It ends the command when standard input ends, that is, when the process with the other end does.
"""

import os
import select
import signal
import subprocess
import sys
import time


def main(grace_s: float, argv: "list[str]") -> int:
    """Run the command and return its exit code, as a shell does."""
    # Python writes into this pipe when a child ends, for there is a handler of SIGCHLD: so one wait is for both ends.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    # A group of its own, so that one signal reaches all that the command has started and that has stayed in the group.
    command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    # The kernel closes the input even if the process with its other end was killed.
    while command.poll() is None and 0 not in select.select([0, woken], [], [])[0]:
        os.read(woken, 1 << 10)
    if command.returncode is None:
        deadline = time.monotonic() + grace_s
        _signal(command.pid, signal.SIGTERM)
        # Signal 0 only tests whether a process of the group is left. The command itself counts until it is reaped.
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
