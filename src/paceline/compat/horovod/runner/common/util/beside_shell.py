"""A program that runs the command of `safe_shell_exec.execute`, started by path for speed.

    python -S beside_shell.py <seconds of grace> <command> [argument ...]

When the caller of `execute` exits, this process's standard input closes. Then this process ends the command.
"""

import os
import select
import signal
import subprocess
import sys
import time


def main(grace_s: float, argv: "list[str]") -> int:
    """Run the command and return its exit code, as a shell does."""
    # Python writes to this pipe when the command ends (SIGCHLD), so that the `select` below wakes up.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    # Start the command in a new process group. One signal then reaches the command and all descendants in its group.
    command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    # Wait until the command or standard input ends. The kernel closes standard input when the calling process dies.
    while command.poll() is None and 0 not in select.select([0, woken], [], [])[0]:
        os.read(woken, 1 << 10)
    if command.returncode is None:
        deadline = time.monotonic() + grace_s
        _signal(command.pid, signal.SIGTERM)
        # Signal 0 only tests whether the group still has a process. The command counts as a process until `poll` reaps it.
        while _signal(command.pid, 0) and time.monotonic() < deadline:
            command.poll()
            time.sleep(0.02)
    # Kill the group even after a normal end, because background processes of the command keep its output pipes open.
    _signal(command.pid, signal.SIGKILL)
    code = command.wait()
    return code if code >= 0 else 128 - code


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    # On macOS, the error is EPERM if the group has only zombies.
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
