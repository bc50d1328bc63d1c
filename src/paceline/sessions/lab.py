"""`python -m paceline.sessions.lab [OPTION ...]`: JupyterLab with a faster start.

    JupyterLab's server   imports, extensions ────────────────── listens ── first kernel requested ──┐
    warm kernel           `... lab --kernel`, imports ── waits ──────────────────────────────────────┴── becomes the kernel

Two parts of JupyterLab's imports take longer than the rest of the server's start: the module `rfc3987_syntax` builds
three parsers, and `jupyterlab.labapp` starts Node.js. The server rarely needs either, so this program skips them. A
warm kernel is a process that becomes the first kernel. Later kernels start as in plain JupyterLab.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from paceline.system import lazy_import

#: Prefix of environment variables that the server sets for each kernel. A kernel reads these variables after its imports.
_OF_KERNEL = "JPY_"
#: Modules that a kernel imports at its start, after `ipykernel.kernelapp`.
_LATER_IMPORTS = ("ipykernel.debugger", "IPython.core.debugger", "sqlite3", "psutil", "tornado.platform.asyncio")
#: Command-line option that makes this module a warm kernel: a process that imports a kernel's modules in advance.
_KERNEL = "--kernel"


def main(words: list[str]) -> None:
    # First start the warm kernel, which imports its modules on another core while this process imports JupyterLab.
    if find_spec("ipykernel_launcher") is not None:
        offer(WarmKernel())
    check_iris_later()
    find_version_without_node()
    sys.argv = ["jupyter-lab", *words]
    runpy.run_module("jupyterlab", run_name="__main__", alter_sys=True)


def check_iris_later() -> None:
    """Defer the import of `rfc3987_syntax` until jsonschema checks the first IRI."""
    name = "rfc3987_syntax"
    if name in sys.modules or (spec := find_spec(name)) is None:
        return

    def is_valid_syntax(term: str, value: str) -> bool:
        return bool(later.__getattr__("is_valid_syntax")(term, value))

    lazy_import.later(name)
    later: Any = sys.modules[name]
    # Set `__path__`, because `from rfc3987_syntax import is_valid_syntax` in jsonschema reads it first.
    later.__path__ = spec.submodule_search_locations
    later.is_valid_syntax = is_valid_syntax


def find_version_without_node() -> None:
    """Prevent the import of JupyterLab from starting Node.js to read Yarn's settings.

    The import creates a settings object only to find JupyterLab's version. Later objects do read Yarn's settings.
    """
    put_back: list[Callable[[], None]] = []

    def shorten(commands: Any) -> None:
        if (read := getattr(commands, "_yarn_config", None)) is not None:
            commands._yarn_config = lambda logger: {"yarn config": {}, "npm config": {}}
            put_back.append(lambda: setattr(commands, "_yarn_config", read))

    lazy_import.when_loaded("jupyterlab.commands", shorten)
    # Register this now and not in the callback above: by then `labapp`, which imports `commands`, is being imported.
    lazy_import.when_loaded("jupyterlab.labapp", lambda _: put_back.pop()() if put_back else None)


class WarmKernel:
    """A process that has imported a kernel's modules, and becomes the first kernel.

    The process is a child of the server, like every kernel, and ends with the server.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", "paceline.sessions.lab", _KERNEL], stdin=subprocess.PIPE, start_new_session=True
        )

    def become(self, cmd: list[str], env: dict[str, str] | None, cwd: str | None) -> subprocess.Popen[bytes] | None:
        """Turn the process into the kernel `cmd`, and return it.

        Return None if the process has ended or is in use already. Also return None if the kernel needs another
        interpreter, program or environment than the process has.
        """
        process, given = self._process, dict(os.environ) if env is None else env
        if (
            process is None
            or process.poll() is not None
            or process.stdin is None
            or cmd[:3] != [sys.executable, "-m", "ipykernel_launcher"]
            or _shared(given) != _shared(self._environment)
        ):
            return None
        self._process = None
        request = {"argv": cmd[3:], "env": {**given, "JPY_PARENT_PID": str(os.getpid())}, "cwd": cwd or os.getcwd()}
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(request).encode())
        except OSError:
            return None
        return process


def _shared(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OF_KERNEL)}


def offer(warm: WarmKernel) -> None:
    """Let Jupyter's server use the warm kernel for its first kernel."""

    def add(module: ModuleType) -> None:
        cold = module.launch_kernel

        def launch_kernel(
            cmd: list[str], env: dict[str, str] | None = None, cwd: str | None = None, **others: Any
        ) -> object:
            # If a kernel needs options such as `independent` or other streams, start a new process instead of the warm kernel.
            found = None if any(others.values()) else warm.become(cmd, env, cwd)
            return cold(cmd, env=env, cwd=cwd, **others) if found is None else found

        module.launch_kernel = launch_kernel  # type: ignore[attr-defined]

    lazy_import.when_loaded("jupyter_client.provisioning.local_provisioner", add)


def become_kernel() -> None:
    """Import a kernel's modules, wait for a request on stdin, and run the kernel.

    Return without running a kernel if the server ends before it sends a request, or if ipykernel can't be imported.
    """
    # Like `ipykernel_launcher`, import nothing from the working directory, which PYTHONSAFEPATH also keeps out of sys.path.
    if has_folder := sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    try:
        import_module("ipykernel.kernelapp")
    except ImportError:
        return  # without this process, the server starts a new kernel, which reports the error
    for name in _LATER_IMPORTS:
        # Ignore errors: the kernel imports these modules again, and then reports the errors.
        with contextlib.suppress(Exception):
            import_module(name)
    if not (data := sys.stdin.buffer.read()):
        return
    request = json.loads(data)
    # Replace the pipe with the request by /dev/null, because a kernel's standard input is empty.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["ipykernel_launcher", *request["argv"]]
    if has_folder:
        sys.path.insert(0, os.getcwd())
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1:] == [_KERNEL]:
        become_kernel()
    else:
        main(sys.argv[1:])
