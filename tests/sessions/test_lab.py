"""JupyterLab's faster start: deferred imports, and the warm kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from paceline.system import processes
from tests.helpers import wait_until, write_tree

#: This module stands in for ipykernel, and writes a file that describes its process.
LAUNCHER = """
import json, os, sys
json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "path": sys.path[0], "pid": os.getpid(),
           "session": os.getsid(0), "stdin": sys.stdin.read(), "main": __name__}, open(sys.argv[1], "w"))
"""
PACKAGES = {
    "ipykernel/__init__.py": "",
    "ipykernel/kernelapp.py": "",
    "ipykernel_launcher.py": LAUNCHER,
    "jupyter_client/__init__.py": "",
    "jupyter_client/provisioning/__init__.py": "",
    "jupyter_client/provisioning/local_provisioner.py": """
def launch_kernel(cmd, stdin=None, env=None, cwd=None, **others):
    return "cold"
""",
}


def run(tmp_path: Path, program: str, packages: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program with these packages on its path."""
    library = write_tree(tmp_path / "packages", packages)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(library)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )


KERNELS = """
import os, sys
from paceline.sessions import lab

lab.offer(lab.WarmKernel())
from jupyter_client.provisioning import local_provisioner

command = [sys.executable, "-m", "ipykernel_launcher"]
start = local_provisioner.launch_kernel
print(start(["other", *command[1:], "x"]))
print(start([*command, "x"], env={**os.environ, "LD_PRELOAD": "x"}))
print(start([*command, "x"], independent=True))
os.mkdir("notes")
kernel = start([*command, os.path.abspath("told")], env={**os.environ, "JPY_SESSION_NAME": "a"}, cwd="notes", stdin=None)
print(kernel.pid, kernel.wait(60))
print(start([*command, "x"]))
"""


def test_first_kernel_reuses_the_prestarted_process_with_the_requested_variables_and_folder(tmp_path: Path) -> None:
    *cold, warm, second = run(tmp_path, KERNELS, PACKAGES).stdout.splitlines()
    # Each of three kernels needs a new process: it has another interpreter, other variables or more options than the
    # prestarted process. A second kernel needs a new process too.
    assert cold == ["cold"] * 3
    assert second == "cold"
    pid, code = warm.split()
    assert code == "0"
    told = json.loads((tmp_path / "told").read_text())
    # The kernel has a session of its own, so that an interrupt reaches its children but not the server.
    assert told["pid"] == told["session"] == int(pid)
    assert told["argv"] == [str(tmp_path / "told")]
    assert told["cwd"] == told["path"] == str(tmp_path / "notes")
    assert told["env"]["JPY_SESSION_NAME"] == "a"
    assert told["env"]["JPY_PARENT_PID"].isdigit()
    assert (told["stdin"], told["main"]) == ("", "__main__")


def test_prestarted_kernel_process_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    program = """
import os, signal
from paceline.sessions import lab

warm = lab.WarmKernel()
print(warm._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    library = write_tree(tmp_path / "packages", PACKAGES)
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(library)},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = server.communicate(timeout=60)
    wait_until(lambda: not processes.is_alive(int(out)), "the warm kernel has ended")


def test_new_kernel_process_starts_if_the_prestarted_process_failed_to_import_ipykernel(tmp_path: Path) -> None:
    program = """
import sys
from paceline.sessions import lab

warm = lab.WarmKernel()
warm._process.wait(60)
lab.offer(warm)
from jupyter_client.provisioning import local_provisioner
print(local_provisioner.launch_kernel([sys.executable, "-m", "ipykernel_launcher", "x"]))
"""
    broken = {**PACKAGES, "ipykernel/kernelapp.py": "import no_such_module"}
    assert run(tmp_path, program, broken).stdout == "cold\n"


def test_module_that_validates_iris_is_imported_at_the_first_validation_and_not_before(tmp_path: Path) -> None:
    program = """
import sys
from paceline.sessions import lab

lab.check_iris_later()
from rfc3987_syntax import is_valid_syntax
print("rfc3987_syntax.syntax_helpers" in sys.modules)
print(is_valid_syntax("iri", "a"), is_valid_syntax("iri", "b"))
import rfc3987_syntax
print(rfc3987_syntax.parse)
"""
    slow = "is_valid_syntax = lambda term, value: (term, value) == ('iri', 'a')\nparse = 'parse'\n"
    packages = {"rfc3987_syntax/__init__.py": "from .syntax_helpers import *", "rfc3987_syntax/syntax_helpers.py": slow}
    assert run(tmp_path, program, packages).stdout.split() == ["False", "True", "False", "parse"]
    (tmp_path / "without").mkdir()
    assert run(tmp_path / "without", "from paceline.sessions import lab; lab.check_iris_later()", {}).stderr == ""


def test_yarn_settings_are_skipped_while_jupyterlab_is_imported_and_read_afterwards(tmp_path: Path) -> None:
    program = """
from paceline.sessions import lab

lab.find_version_without_node()
import jupyterlab.labapp
from jupyterlab import commands
print(jupyterlab.labapp.at_import, commands._yarn_config(None))
"""
    packages = {
        "jupyterlab/__init__.py": "",
        "jupyterlab/commands.py": "def _yarn_config(logger): return 'read by node'",
        "jupyterlab/labapp.py": "from . import commands\nat_import = commands._yarn_config(None)['yarn config']",
    }
    assert run(tmp_path, program, packages).stdout == "{} read by node\n"
