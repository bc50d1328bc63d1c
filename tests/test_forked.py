"""Scripts that are forks run as they would by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import require_module
from tests.helpers import wait_until
from tests.warm import fork_scripts
from tests.warm.ways import VARIABLE


@pytest.fixture(autouse=True)
def with_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    require_module("torch")
    if not sys.platform.startswith("linux"):
        pytest.skip("scripts are forks on Linux alone")
    fork_scripts(monkeypatch)


def start(path: Path, text: str, *words: str, options: tuple[str, ...] = (), **given: Any) -> subprocess.Popen[str]:
    path.write_text(text)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | given
    return subprocess.Popen([sys.executable, *options, path.name, *words], cwd=path.parent, **pipes)


def test_forked_script_has_its_own_argv_cwd_and_descriptors_but_no_modules_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = __name__")
    inner, outer = os.pipe()
    script = f"""
import json, os, sys
os.write({outer}, b"kept")
loaded = sorted(name for name in ("numpy", "torch", "torch.optim.optimizer") if name in sys.modules)
import beside
class Kept: pass
import pickle
pickle.loads(pickle.dumps(Kept()))
print(json.dumps([sys.argv, __file__, __name__, os.getcwd(), os.environ["OWN"], loaded, beside.name, sys.stdin.read()]))
sys.exit(7)
"""
    read, write = os.pipe()
    os.write(write, b"typed")
    os.close(write)
    process = start(
        tmp_path / "a.py", script, "--x", "1", pass_fds=[outer], stdin=read, env={**os.environ, "OWN": "mine"}
    )
    os.close(read)
    os.close(outer)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 7, err
    assert json.loads(out) == [["a.py", "--x", "1"], "a.py", "__main__", str(tmp_path), "mine", [], "beside", "typed"]
    assert os.read(inner, 9) == b"kept"
    os.close(inner)


def test_forked_script_gets_preloaded_libraries(tmp_path: Path) -> None:
    script = """
import time
before = time.process_time()
import sys, torch
assert "torch.distributed" in sys.modules
optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
import inspect, os
assert inspect.getsource(torch.nn.Linear) and torch.__spec__.loader is torch.__loader__
print("forked" if os.getppid() != int(sys.argv[1]) else "a child of the test")
"""
    process = start(tmp_path / "a.py", script, str(os.getpid()))
    assert process.communicate(timeout=180) == ("forked\n", "")


def test_import_hooks_change_preloaded_modules(tmp_path: Path) -> None:
    script = """
import sys
from paceline.system.lazy_import import when_loaded

def change(module):
    made = module.init_process_group
    module.init_process_group = lambda *given: ("changed", *given)

when_loaded("torch.distributed.distributed_c10d", change)
when_loaded("torch.optim.optimizer", lambda module: print("heard of", module.__name__))
import torch
print(torch.distributed.init_process_group("x"))
from torch.distributed import init_process_group
print(init_process_group("y"))
"""
    process = start(tmp_path / "a.py", script)
    out, err = process.communicate(timeout=180)
    assert sorted(out.splitlines()) == ["('changed', 'x')", "('changed', 'y')", "heard of torch.optim.optimizer"], err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signal_reaches_the_forked_script_and_its_exit_code_is_returned(number: int, tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
try:
    print(os.getpid(), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("asked to end")
    raise
"""
    process = start(tmp_path / "a.py", script)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.send_signal(number)
    out, err = process.communicate(timeout=180)
    assert process.returncode == -number
    assert ("asked to end" in out) == ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the script has ended too")


def test_traceback_of_a_forked_script_has_its_own_frames_only(tmp_path: Path) -> None:
    process = start(tmp_path / "a.py", "import atexit\natexit.register(print, 'at the end')\n1 / 0\n")
    out, err = process.communicate(timeout=180)
    assert (process.returncode, out) == (1, "at the end\n")
    assert err.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in <module>',
        "    1 / 0",
    ]


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_output_of_a_forked_script_is_buffered_as_in_a_separately_started_script(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    script = "import os, sys\nprint('said')\nsys.stdout.buffer.write(b'and ')\nos.write(1, b'written\\n')\n"
    process = start(tmp_path / "a.py", script, options=options)
    without = {name: value for name, value in os.environ.items() if name != VARIABLE}
    by_itself = start(tmp_path / "a.py", script, options=options, env=without)
    assert process.communicate(timeout=180) == by_itself.communicate(timeout=180)
