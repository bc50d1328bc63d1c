"""Let a program that has libraries loaded run a script. Every such script starts here, so few modules are imported.

As a program: `hand_over.py [--hides] SOCKETS SCRIPT ...`, for a rank of mpirun or horovodrun, with a socket for each rank.
"""

import _socket
import marshal
import os
import signal
import sys


def ask(
    socket,
    words,
    environment,
    folder,
    fds,
    *,
    python=sys.executable,
    path=None,
    hides=False,
    frees=True,
):
    """Request a fork that runs this script. Return the connection, which yields the fork's pid, then its exit code.

    Args:
        socket: The program's socket.
        words: The script and its arguments.
        environment: The script's variables.
        folder: The script's working directory.
        fds: Descriptor number in the script -> descriptor in this process.
        python: The script's `sys.executable`.
        path: The script's `sys.path` after its own folder; None for the program's.
        hides: Hide loaded modules until the script imports them.
        frees: Free all modules at the end, as the interpreter does. Takes 0.15 CPU seconds for torch.
    """
    umask = os.umask(0)
    os.umask(umask)
    request = {
        **{"words": list(words), "environment": dict(environment), "folder": str(folder), "fds": list(fds)},
        **{"umask": umask, "python": python, "path": path, "hides": hides, "frees": frees},
    }
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    # Send the request in a file, because the size of a packet is limited.
    file = os.memfd_create("request")
    try:
        connection.connect(socket)
        with open(file, "wb", closefd=False) as writer:
            marshal.dump(request, writer)
        numbers = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (file, *fds.values()))
        connection.sendmsg([b"start"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(file)
    return connection


def hand_over(socket, words, *, send=os.kill, **options):
    """Replace this process by a fork that runs the script: forward descriptors and signals, and exit with its code.

    The fork ends with this process.

    Args:
        socket: The program's socket.
        words: The script and its arguments.
        send: Forwards a signal; `os.killpg` forwards it to the script's children too.
        options: Options of `ask`.
    """
    child, early = 0, []

    def pass_on(number, frame=None):
        try:
            send(child, number) if child else early.append(number)
        except ProcessLookupError:
            pass  # the process has ended, and its exit code follows

    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "CONT"):
        number = getattr(signal, f"SIG{name}")
        # If this process ignores a signal, the fork ignores it too.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    fds = {fd: fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}
    connection = ask(socket, words, os.environ, os.getcwd(), fds, **options)
    child = int(connection.recv(64) or 0)
    for number in early:
        pass_on(number)
    code = int(connection.recv(64) or -signal.SIGKILL) if child else -signal.SIGKILL
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _is_open(fd):
    """Return False for the closed descriptor that listed the folder."""
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False


if __name__ == "__main__":
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
    is_hidden = sys.argv[1] == "--hides"
    sockets, *script = sys.argv[1 + is_hidden :]
    hand_over(sockets.split(os.pathsep)[int(rank)], script, hides=is_hidden)
