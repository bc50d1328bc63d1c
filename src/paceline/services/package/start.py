"""Serve the model in this folder.

python start.py [--host ADDRESS] [--port N] [--workers N]

PACELINE_KEY            the key of requests (Authorization: Bearer KEY); required if other machines can reach the host
PACELINE_SECONDARY_KEY  a second valid key

python start.py --check exits with code 0 if the server at --port is ready.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "library"
# Without the folder `library`, the program runs in a run's worker, which has Paceline already.
if LIBRARY.is_dir():
    sys.path.insert(0, str(LIBRARY))


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve the model that lies beside this file.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--workers", type=int, help="model processes; default: as it was packaged")
    parser.add_argument("--no-key", action="store_true", help="need no key, even if other machines can reach the host")
    parser.add_argument("--check", action="store_true", help="exit with code 0 if the server is ready")
    arguments = parser.parse_args()
    if arguments.check:
        return check(arguments.port)
    key = os.environ.get("PACELINE_KEY", "")
    from paceline.system.listening import is_loopback
    from paceline.system.scratch import Scratch

    if not key and not arguments.no_key and not is_loopback(arguments.host):
        parser.error(
            f"--host {arguments.host} can be reached from other machines: set PACELINE_KEY to the key of requests, or "
            "say --no-key."
        )
    # The server writes into a private folder, because the package's folder may be read-only.
    with Scratch("service") as folder:
        return serve(folder, arguments, key)


def serve(folder: Path, arguments: argparse.Namespace, key: str) -> int:
    from paceline.serving.__main__ import main as run_server

    config = json.loads((HERE / "service.json").read_text())
    for model in config["models"]:
        model["path"] = str(HERE / model["path"])
        if model.get("hashes"):
            model["hashes"] = str(HERE / model["hashes"])
    if config.get("source_dir"):
        config["source_dir"] = str(HERE / config["source_dir"])
    if key:
        keys = {"primary": key, "secondary": os.environ.get("PACELINE_SECONDARY_KEY") or key}
        path = folder / "keys.json"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(keys, file)
        config["keys_file"] = str(path)
    is_run = bool(os.environ.get("PACELINE_RUN_ID"))
    # The server refuses to open a public address without a key, but accepts a socket that it inherits.
    if is_run or (arguments.no_key and not key):
        listener = socket.create_server((arguments.host, arguments.port), backlog=2048)
        port = listener.getsockname()[1]
        config["listen_fd"] = listener.detach()
    config |= {"host": arguments.host, "port": arguments.port, "workers": arguments.workers or config["workers"]}
    # Hide the keys from the processes that run the script.
    for name in ("PACELINE_KEY", "PACELINE_SECONDARY_KEY"):
        os.environ.pop(name, None)
    if LIBRARY.is_dir():
        # Let the script's processes import Paceline.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(LIBRARY), os.environ.get("PYTHONPATH"))))
    if is_run:
        # Report the address too: the supervisor parses the line printed below, and may not be able to resolve the node's name.
        address = "-"
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
        print(f"paceline: this service listens at port {port} of {address}", file=sys.stderr, flush=True)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(config))
    return run_server([str(config_file)])


def check(port: int) -> int:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return 0
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
