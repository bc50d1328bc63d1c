"""Ask a warm spare, an idle process (`paceline.worker.spare`), to fork a worker.

    client                                spare
    one byte                         <-   ready to fork
    length, JSON, three descriptors  ->   forks; the fork takes over the descriptors
    {"pid"} or {"error": reason}     <-
    end of the connection            <-   only with `follow`, when the fork has ended

A client sends its request only after it has received the byte. Otherwise a busy spare could read the request late,
after the client has given up and started the worker itself.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence

# Don't import typing: it takes longer to load than everything else before the script's first line.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

#: Variable with the path prefix of the files of a node's spare (a pre-started Python process). `%` stands for the node's rank.
VARIABLE = "PACELINE_SPARE"
#: Variable with the hexadecimal secret of a run's workers and of its processes that keep states copied between nodes.
KEY_VARIABLE = "PACELINE_STATES_KEY"
LENGTH = struct.Struct("!I")
#: Seconds to wait for a spare that may be importing a module; and for the spare's answer after a fork (some 20 ms).
_FREE_S, _ANSWER_S = 1.0, 10.0


def socket_of(path: str) -> str:
    """Return the path of a warm spare's Unix socket, given its path prefix."""
    return f"{path}.socket"


def modules_of(path: str) -> str:
    """Return the path of the list of modules that a warm spare preloads."""
    return f"{path}.modules"


def keeper_of(spare: str) -> str:
    """Return the socket prefix of the process that keeps training states, given a warm spare's."""
    return f"{spare}_states"


def address_file(spare: str) -> str:
    """Return the file with the address at which the next node keeps training states."""
    return f"{keeper_of(spare)}.next"


def ask(
    path: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: Sequence[int], *, follow: bool = False
) -> tuple[int, socket.socket]:
    """Let a warm spare fork the worker `argv`. Return the worker's pid and the connection.

    Args:
        path: Prefix of the spare's socket paths, as `path_here` returns it.
        argv: The worker's command line, from the interpreter on.
        env: The worker's whole environment.
        cwd: The worker's working directory.
        fds: Descriptors for the worker's standard input, output and error.
        follow: Whether the fork keeps the connection open, so that the end of the connection shows the end of the fork.

    Raises:
        OSError: There is no spare, or the spare did not fork; `strerror` has the reason.
    """
    connection = connect(path)
    try:
        request = json.dumps({"argv": list(argv), "env": dict(env), "cwd": cwd, "follow": follow}).encode()
        socket.send_fds(connection, [LENGTH.pack(len(request))], list(fds))
        connection.sendall(request)
        try:
            answer = json.loads(connection.makefile("rb").readline() or b"{}")
        except TimeoutError as error:
            raise OSError(error.errno, f"the warm process did not answer within {_ANSWER_S:g} s") from None
        if "pid" not in answer:
            raise OSError(0, answer.get("error", "the warm process ended"))
        connection.settimeout(None)
        return int(answer["pid"]), connection
    except BaseException:
        connection.close()
        raise


def connect(path: str) -> socket.socket:
    """Connect to the warm spare (idle process) with path prefix `path`.

    Raises:
        OSError: There is no spare, or it is busy.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_FREE_S)
        try:
            connection.connect(socket_of(path))
            if not connection.recv(1):
                raise OSError(0, "the warm process ended")
        except TimeoutError as error:
            raise OSError(error.errno, "the warm process is still loading") from None
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise OSError(error.errno, "no warm process is ready") from None
        connection.settimeout(_ANSWER_S)
        return connection
    except BaseException:
        connection.close()
        raise


def path_here(environ: Mapping[str, str] = os.environ) -> str:
    """Return the socket path prefix of this node's idle spare process, or ""."""
    return environ.get(VARIABLE, "").replace("%", environ.get("NODE_RANK", "0"))


def listen(path: str) -> socket.socket:
    """Return a listening Unix socket at `path`, which only this user can connect to."""
    try:
        os.unlink(path)  # remove the socket of the process that this process replaces
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX)
    old = os.umask(0o077)
    try:
        # Rename the socket only once it listens, so that a client that sees the name can connect.
        listener.bind(f"{path}~")
        listener.listen(64)
        os.rename(f"{path}~", path)
    finally:
        os.umask(old)
    return listener


def read_request(connection: socket.socket) -> tuple[list[int], dict[str, Any]]:
    """Read a client's request. Return its file descriptors and its JSON.

    Raises:
        PermissionError: The client belongs to another user.
        ValueError: The request is invalid, or the client has given up.
    """
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise PermissionError(f"the request comes from user {uid}")
    head, fds, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    try:
        if len(head) != LENGTH.size:
            raise ValueError("the client has given up")
        (size,) = LENGTH.unpack(head)
        return list(fds), json.loads(connection.makefile("rb").read(size))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
