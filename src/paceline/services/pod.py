"""The program of a service's pod on Kubernetes, which becomes the server.

`paceline.targets.kubernetes.boot` calls `main`. The ticket has:

    {"parts": N, "environment": {...}, "variables": {...}, "volume": true}

The files `package.0`, `package.1`, ... are together the folder that `paceline package` writes, as a tar.gz.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import site
import sys
import tarfile
from pathlib import Path

from paceline.errors import PacelineError
from paceline.job.environment import EnvironmentSpec
from paceline.launchers.environment import of_interpreter
from paceline.services.prepare import prepare
from paceline.targets.kubernetes.manifests import ADDRESS_VARIABLE, CODE, FAILURES_VARIABLE, POD_PORT, TOP, VOLUME
from paceline.targets.kubernetes.pod import extract, link_to_volume
from paceline.targets.kubernetes.ticket import COMPLAINT, EXIT_COMPLAINT


def main(path: str, library: str) -> int:
    """Build the environment and become the server. Return an exit code on failure."""
    ticket = json.loads(Path(path).read_text(encoding="utf-8"))
    top, folder = Path(TOP), Path(TOP) / "service"
    try:
        if not folder.exists():  # the first start of this pod's container
            (top / "home").mkdir(parents=True, exist_ok=True)
            if ticket["volume"] and not (top / "environments").exists():
                link_to_volume(TOP, VOLUME)
            parts = [Path(f"{CODE}/package.{number}").read_bytes() for number in range(ticket["parts"])]
            extract(io.BytesIO(b"".join(parts)), top / "service.new")
            (top / "service.new").rename(folder)
        _find_packages()
        _, setup = prepare(top, EnvironmentSpec.from_json(ticket["environment"]), lambda line: print(line, flush=True))
        variables = {
            name: text for name, text in os.environ.items() if name not in (ADDRESS_VARIABLE, FAILURES_VARIABLE)
        }
        variables |= of_interpreter(setup, {}, Path(library), os.environ)
        variables |= {"PYTHONUNBUFFERED": "1", **ticket["variables"]}
        host = "::" if ":" in os.environ.get(ADDRESS_VARIABLE, "") else "0.0.0.0"
        words = [str(folder / "start.py"), "--host", host, "--port", str(POD_PORT), "--workers", "1"]
        os.chdir(folder)
        os.execve(setup.python, [setup.python, *words], variables)
    except (PacelineError, ImportError, OSError, tarfile.TarError) as error:
        print(f"{COMPLAINT}{error}", flush=True)
        return EXIT_COMPLAINT


def _find_packages() -> None:
    """Let this process import the image's packages, and pip's copy of `packaging`."""
    site.main()  # add the image's packages to sys.path: `boot` has started without them
    if importlib.util.find_spec("packaging") is None:
        sys.modules["packaging"] = importlib.import_module("pip._vendor.packaging")
