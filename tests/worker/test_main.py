"""The worker's command line, and its part under mpirun: its own log, and a process that sees its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from tests.engines.conftest import require_module
from tests.helpers import wait_until

MAIN = Path(paceline.__file__).parent / "worker/__main__.py"


class Worker:
    """One worker in a world of one, started as by mpirun."""

    def __init__(self, top: Path) -> None:
        self.run_dir, self.work, self.attempt = top / "run", top / "run/work", top / "run/attempts/1"
        self.work.mkdir(parents=True)
        self.attempt.mkdir(parents=True)

    def start(self, script: str, *words: str, **variables: str) -> subprocess.Popen[str]:
        (self.work / "train.py").write_text(script)
        mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        run = {
            "PACELINE_RUN_DIR": str(self.run_dir),
            "PACELINE_ATTEMPT": "1",
            "PACELINE_WORLD_SIZE": "1",
            "WORLD_SIZE": "1",
        }
        return subprocess.Popen(
            [sys.executable, str(MAIN), *(words or ("--mpi", "--", "train.py"))],
            cwd=self.work,
            env={**os.environ, "PYTHONPATH": str(MAIN.parents[2]), "PYTHONUNBUFFERED": "1", **mpi, **run, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *words: str, **variables: str) -> tuple[int, str]:
        """Return the exit code that mpirun sees, and the output that it gets."""
        process = self.start(script, *words, **variables)
        text, _ = process.communicate(timeout=180)
        return process.returncode, text

    @property
    def log(self) -> str:
        return (self.attempt / "rank_0.log").read_text()

    def written(self, name: str) -> dict:
        return json.loads((self.attempt / f"{name}_0.json").read_text())


@pytest.fixture
def worker(tmp_path):
    return Worker(tmp_path)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError('bad batch')", 1),
        ("import os; os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os; os.abort()", 134),
    ],
)
def test_worker_exits_with_0_for_mpirun_and_records_the_script_exit_code(worker, script, code):
    # If mpirun saw a failure, it would kill the other ranks before they could report what went wrong.
    assert worker.run(script) == (0, "")
    assert worker.written("end")["exit_code"] == code


def test_worker_output_goes_to_the_log_of_its_rank_and_not_through_mpirun(worker):
    script = "import os, sys; print('out'); print('err', file=sys.stderr); os.system('echo child')"
    assert worker.run(script) == (0, "")
    assert worker.log == "out\nerr\nchild\n"


def test_script_gets_its_rank_variables(worker):
    worker.run("import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['TORCHELASTIC_ERROR_FILE'])")
    assert worker.log == f"0 0 {worker.attempt}/error_0.json\n"


def test_recorded_start_has_the_pid_of_the_script(worker):
    worker.run("import os; print(os.getpid())")
    assert worker.written("start")["pid"] == int(worker.log)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_are_forwarded_to_the_script(worker, name):
    script = (
        "import signal, sys, time\n"
        f"signal.signal(signal.{name}, lambda *a: (print('got it'), sys.exit(7)))\n"
        "print('ready')\ntime.sleep(60)\n"
    )
    process = worker.start(script)
    wait_until(lambda: (worker.attempt / "rank_0.log").exists() and "ready" in worker.log, "the script")
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=90) == 0
    process.stdout.close()
    assert worker.log == "ready\ngot it\n"
    assert worker.written("end")["exit_code"] == 7


def test_a_script_without_a_handler_ends_by_the_signal(worker):
    process = worker.start("import time; print('ready'); time.sleep(60)")
    wait_until(lambda: (worker.attempt / "rank_0.log").exists() and "ready" in worker.log, "the script")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0
    process.stdout.close()
    assert worker.written("end")["exit_code"] == 143


def test_variables_of_the_command_line_are_set_for_the_script(worker):
    words = ("--mpi", "--set", "A=b=c d", "--set", "EMPTY=", "--set", "LOCAL_RANK=5", "--", "train.py", "--set", "X=1")
    worker.run(
        "import os, sys; print([os.environ[n] for n in ('A', 'EMPTY', 'LOCAL_RANK')], sys.argv, 'X' in os.environ)",
        *words,
    )
    assert worker.log == "['b=c d', '', '5'] ['train.py', '--set', 'X=1'] False\n"


def test_arguments_with_a_leading_equals_sign_are_unescaped(worker):
    words = ("=--mpi", "=--set", "=A=b", "=--", "=train.py", "=--", "==x", "=", "=:")
    worker.run("import os, sys; print(os.environ['A'], sys.argv)", *words)
    assert worker.log == "b ['train.py', '--', '=x', '', ':']\n"


def test_script_without_mpi_runs_in_the_worker_process(worker):
    code, text = worker.run("import sys; print('out'); sys.exit(3)", "--", "train.py", PACELINE_RANK="0")
    assert (code, text) == (3, "out\n")
    assert worker.written("start")["pid"] > 0
    assert not (worker.attempt / "end_0.json").exists()


def test_wrong_world_size_fails_before_the_script_starts(worker):
    code, text = worker.run("print('ran')", WORLD_SIZE="2")
    assert code == 1
    assert "mpirun started 1 workers, but the job has 2" in text
    assert "ran\n" not in text


def test_modules_in_the_working_directory_do_not_shadow_the_standard_library(worker):
    # Regression: a worker started with `-m` imported the script's own `json.py` instead of the standard module.
    (worker.work / "json.py").write_text("raise RuntimeError('not this one')")
    (worker.work / "os.py").write_text("raise RuntimeError('not this one')")
    assert worker.run("print('fine')") == (0, "")
    assert worker.log == "fine\n"


def test_worker_loads_few_modules_before_the_script(worker):
    """Every module delays the script's first line; modules that the interpreter loads by itself are not counted."""
    ask = "import sys; print(*sys.modules)"
    own = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    code, text = worker.run(ask, "--", "train.py", PACELINE_RANK="0")
    assert code == 0
    loaded = {name.partition(".")[0] for name in set(text.split()) - set(own)}
    assert loaded <= {"__future__", "__paceline_main__", "faulthandler", "importlib", "paceline", "types", "warnings"}


def test_worker_imports_triton_before_tensorflow(worker: Worker) -> None:
    for name in ("tensorflow", "triton"):
        (worker.work / f"{name}.py").write_text(f"print({name!r})")
    code, text = worker.run("import tensorflow")
    assert (code, worker.log.split()) == (0, ["triton", "tensorflow"]), text


@pytest.mark.promise("script-imports-tensorflow-then-torch")
def test_script_that_imports_tensorflow_and_then_torch_compile_survives(worker: Worker) -> None:
    require_module("tensorflow")
    # Builds of torch for CPUs do not include Triton.
    pytest.importorskip("triton")
    # If Triton's library is loaded after TensorFlow's, the process ends with SIGSEGV.
    code, text = worker.run("import tensorflow\nimport torch._dynamo\nprint('alive')")
    assert code == 0, text + worker.log
    assert worker.log.split()[-1] == "alive"
