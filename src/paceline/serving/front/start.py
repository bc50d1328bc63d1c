"""Start a server: check its configuration, and start the model processes.

Model processes start before the slow packages of this process are imported. So this module imports nothing slow.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

from paceline.errors import ServingError
from paceline.serving import state
from paceline.serving.config import ServerConfig, read
from paceline.serving.front.keys import read_keys
from paceline.serving.front.models import lay_out, verify
from paceline.serving.front.process import StartedModel
from paceline.system.files import remove_tree
from paceline.system.listening import listen_at

_BACKLOG = 2048


def run(config_file: Path) -> int:
    """Run a server until a signal ends it. Return its exit code."""
    config_file = config_file.absolute()
    folder = config_file.parent
    config: ServerConfig | None = None
    listener = None
    started: list[StartedModel] = []
    try:
        config = read(config_file)
        logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
        keys = read_keys(config.keys_file) if config.keys_file is not None else ()
        verify(config)
        listener = listen(config)
        model_dir = lay_out(config, folder)
        for _ in range(config.workers):
            started.append(StartedModel(config, folder, model_dir))
        try:
            from paceline.serving.front.group import serve
        except ImportError as error:
            raise ServingError(
                f"{error.name or error} can't be imported by {sys.executable}. Install what a server needs: "
                "pip install 'paceline[serve]'."
            ) from error
        return serve(config_file, config, keys, listener, started, model_dir)
    except (ServingError, OSError) as error:
        state.write_state(folder, failed(config, str(error)))
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        for each in started:
            each.end()
        if listener is not None:
            listener.close()
        for name in ("shared", "azureml-models"):
            remove_tree(folder / name)
        if config is not None and config.is_temporary:
            remove_tree(folder)


def listen(config: ServerConfig) -> socket.socket:
    """Return a listening socket: a new socket, or the inherited socket `listen_fd`.

    Raises:
        ServingError: The port is taken, the host is not this machine, or `listen_fd` is not a listening socket.
    """
    if config.listen_fd is not None:
        try:
            listener = socket.socket(fileno=config.listen_fd)
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("it does not listen")
        except OSError as error:
            raise ServingError(
                f"listen_fd={config.listen_fd} is not a listening socket that this process has inherited: {error}."
            ) from error
        os.set_inheritable(config.listen_fd, False)
        return listener
    try:
        return listen_at(config.host, config.port, _BACKLOG)
    except OSError as error:
        raise ServingError(
            f"can't listen at host={config.host!r}, port={config.port}: {error.strerror or error}. Choose another port, or 0 "
            "for a free one."
        ) from error


def failed(config: ServerConfig | None, error: str) -> state.ServerState:
    """Return the state of a server that failed to start, for `server.json`."""
    return {
        "pid": os.getpid(),
        "scheme": "http",
        "host": "",
        "port": 0,
        "state": state.FAILED,
        "error": error,
        "revision": config.revision if config else "",
        "refused": None,
        "workers": [],
    }
