"""Has a script run by a program that has its libraries loaded. Little is imported: it runs in the place of every such script.

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
    supervisors=None,
):
    """The connection over which the program at this socket tells the pid of a process that runs this script, and its end.

    fds: number that a descriptor has for the script -> descriptor here. python: what the script finds as `sys.executable`.
    path: where it looks for modules, behind its own folder, if not where the program does.
    hides: for the script nothing is loaded until it imports it. frees: it ends as the interpreter does, to the last; without
    it, what is loaded is not freed, which takes a processor 0.15 s for torch. supervisors: who forks those that it starts, if
    anybody does (`asking.submit_with`).
    """
    umask = os.umask(0)
    os.umask(umask)
    told = {"words": list(words), "environment": dict(environment), "folder": str(folder), "fds": list(fds)}
    told.update(umask=umask, python=python, path=path, hides=hides, frees=frees, supervisors=supervisors)
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    # By a file, for a packet has a largest size.
    file = os.memfd_create("told")
    try:
        connection.connect(socket)
        with open(file, "wb", closefd=False) as writer:
            marshal.dump(told, writer)
        given = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (file, *fds.values()))
        connection.sendmsg([b"start"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, given)])
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(file)
    return connection


def hand_over(socket, words, *, send=os.kill, **options):
    """Have the script run in this process's place, with its descriptors, and end as it does; it ends with this process.

    send: for the signals that this process has; `os.killpg` where what the script has started is to have them too.
    """
    child, early = 0, []

    def pass_on(number, frame=None):
        try:
            send(child, number) if child else early.append(number)
        except ProcessLookupError:
            pass  # its end is about to be told

    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "CONT"):
        number = getattr(signal, f"SIG{name}")
        # What is ignored here is ignored there.
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
    """False for the one by which they were listed."""
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False


if __name__ == "__main__":
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
    is_hidden = sys.argv[1] == "--hides"
    sockets, *script = sys.argv[1 + is_hidden :]
    hand_over(sockets.split(os.pathsep)[int(rank)], script, hides=is_hidden)
