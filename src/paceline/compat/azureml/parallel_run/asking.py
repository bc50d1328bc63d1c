"""The connection between the first rank, which shares mini-batches out, and the others. The run's secret opens it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.compat.azureml.parallel_run.sharing import Sharing
from paceline.system.handshake import RUN_SECRET_VARIABLE, prove_as_client, prove_as_server
from paceline.system.listening import accept_each

_PAUSE_S = 0.1
Ask = Callable[[dict[str, Any]], dict[str, Any]]


class Listening:
    """Answers the other ranks, of which there are `count`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sharing: Sharing | None = None
        self._made = threading.Event()
        self._left = threading.Semaphore(0)
        if count:
            self._socket = socket.create_server(_address(), backlog=count)
            # A thread for each from there on: whoever connects and says nothing holds nobody up.
            threading.Thread(target=accept_each, args=(self._socket, self._answer), daemon=True).start()

    def share(self, sharing: Sharing) -> None:
        """Begin to answer: the others may have connected long ago."""
        self._sharing = sharing
        self._made.set()

    def wait(self) -> None:
        """Until each has heard that there is nothing left: one that came too late would find nobody."""
        for _ in range(self._count):
            self._left.acquire()

    def _answer(self, accepted: socket.socket) -> None:
        try:
            link = prove_as_server(accepted, _secret())
        except ConnectionError:
            return
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
            # It has died: its supervisor ends the run.
            if number is not None and self._sharing is not None:
                self._sharing.lost(number)
        finally:
            link.close()


def of_first_rank() -> Ask:
    """Asks over the network. The first rank may be about to listen: it is tried until it does, for without it the run ends."""
    while True:
        try:
            found = socket.create_connection(_address())
        except OSError:
            time.sleep(_PAUSE_S)
        else:
            break
    link = prove_as_client(found, _secret())

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        link.send_bytes(json.dumps(question).encode())
        answer: dict[str, Any] = json.loads(link.recv_bytes())
        return answer

    return ask


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _secret() -> bytes:
    return bytes.fromhex(os.environ[RUN_SECRET_VARIABLE])
