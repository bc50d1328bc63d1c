"""The connection through which ranks request mini-batches from the first rank.

The run's secret authenticates the ranks.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from paceline.compat.azureml.parallel_run.sharing import RankRequest, RankResponse, Sharing
from paceline.system.handshake import RUN_SECRET_VARIABLE, authenticate, serve_each

_PAUSE_S = 0.1
Ask = Callable[[RankRequest], RankResponse]


class Listening:
    """A server on the first rank that hands mini-batches to `count` other ranks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sharing: Sharing | None = None
        self._made = threading.Event()
        self._left = threading.Semaphore(0)
        if count:
            self._socket = socket.create_server(_address(), backlog=count)
            threading.Thread(target=serve_each, args=(self._socket, _secret(), self._answer), daemon=True).start()

    def share(self, sharing: Sharing) -> None:
        """Start to answer requests with mini-batches of `sharing`."""
        self._sharing = sharing
        self._made.set()

    def wait(self) -> None:
        """Block until every rank has heard that no mini-batches are left."""
        for _ in range(self._count):
            self._left.acquire()

    def _answer(self, link: Connection) -> None:
        number: int | None = None
        try:
            self._made.wait()
            assert self._sharing is not None, "it was set before the event"
            while True:
                answer = self._sharing.handle(json.loads(link.recv_bytes()))
                number = None if answer["batch"] is None else answer["batch"]["number"]
                link.send_bytes(json.dumps(answer).encode())
                if number is None:
                    self._left.release()
                    return
        except Exception:
            # The rank has crashed. Put its mini-batch back into the queue. The rank's supervisor ends the run.
            if number is not None and self._sharing is not None:
                self._sharing.lost(number)


def of_first_rank() -> Ask:
    """Return a function that sends requests to the first rank.

    The call waits until the first rank listens.
    """
    while True:
        try:
            found = socket.create_connection(_address())
        except OSError:
            time.sleep(_PAUSE_S)
        else:
            break
    link = authenticate(found, _secret(), is_client=True)

    def ask(question: RankRequest) -> RankResponse:
        link.send_bytes(json.dumps(question).encode())
        answer: RankResponse = json.loads(link.recv_bytes())
        return answer

    return ask


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _secret() -> bytes:
    return bytes.fromhex(os.environ[RUN_SECRET_VARIABLE])
