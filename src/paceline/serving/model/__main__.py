"""A model process: `python -m paceline.serving.model FD FLAG`.

FD is the file descriptor of its socket to the front, the process that holds the clients' connections. FLAG is the
descriptor of a file with one byte, which becomes 1 when the client disconnects (`watch_client`). One thread receives
requests, calls the model and sends the responses. So user code never runs concurrently.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict

from paceline.errors import PacelineError
from paceline.serving import watch_client, wire
from paceline.serving.model.answers import show
from paceline.serving.model.script import load
from paceline.system.lazy_import import load_triton_before_tensorflow


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    watch_client(int(sys.argv[2]))
    # Ignore signals that systemd or a terminal sends to all processes: the HTTP server ends this process through the socket.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _die_with(os.getppid())
    load_triton_before_tensorflow()
    setup = wire.receive(link)
    if setup is not None and _serve(link, wire.ModelSetup.from_json(json.loads(setup[1]))):
        _end_all()


def _serve(link: socket.socket, setup: wire.ModelSetup) -> bool:
    """Load the model, and serve until the socket closes. Return False if loading failed."""
    try:
        model = load(setup)
        ready = wire.LoadedModel(model.kind, model.wants_head, model.is_batched, model.documents())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not isinstance(error, PacelineError):
            show(error)
        link.sendall(wire.json_frame(wire.FAILED, {"error": told(error)}))
        return False
    sys.stdout.flush()
    link.sendall(wire.json_frame(wire.READY, asdict(ready)))
    while (frame := wire.receive(link)) is not None:
        calls = list(wire.unpack_calls(frame[1]))
        replies = model.answer(calls)
        link.sendall(
            wire.frame(
                wire.REPLIES,
                b"".join(wire.pack_reply(call.number, reply) for call, reply in zip(calls, replies, strict=True)),
            )
        )
    return True


def told(error: BaseException) -> str:
    """Return one line on why and where loading the model failed."""
    if isinstance(error, PacelineError):
        return str(error)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((here, "<frozen", os.path.dirname(os.__file__)))
    ]
    at = f" ({places[-1].filename}, line {places[-1].lineno}, in {places[-1].name})" if places else ""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        at = f" ({error.filename}, line {error.lineno})"
        text = error.msg
    return f"{type(error).__name__}: {text}{at}" if text else f"{type(error).__name__}{at}"


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies (prctl(2))."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the HTTP server died before the call of prctl
            os._exit(1)


def _end_all() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
