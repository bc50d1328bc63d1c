"""The installed `paceline` program, run as a user runs it, in an environment of few variables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.system import processes
from tests.cli.output_types import misfits, type_of
from tests.engines.lab import processes_below
from tests.warm import run_command

PROGRAM = shutil.which("paceline", path=sysconfig.get_path("scripts"))


class Cli:
    """`paceline`, in the working directory `folder` and for the workspace `<folder>/.paceline`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            # The state folder lists the workspaces that this user trusts. The test's own process uses the same folder,
            # so the command trusts workspaces that the test creates.
            "XDG_STATE_HOME": str(folder / "state"),
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "PACELINE_LEASES": str(folder / "leases"),
        }

    def __call__(
        self, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Return the command's output. Fail unless it exits with `code`."""
        argv, environment, folder = self.argv(*words), {**self.environment, **(env or {})}, cwd or self.folder
        # Python reads PYTHON variables only at its start, so a forked process would ignore them.
        if any(name.startswith("PYTHON") and name != "PYTHONPATH" for name in environment):
            options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
            done = subprocess.run(argv, env=environment, cwd=folder, check=False, **options)
        else:
            done = run_command(*argv, environment=environment, folder=folder, timeout_s=300)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback (most recent call last)" not in done.stderr.replace("    Traceback", "")
        return done

    def json(self, *words: object) -> Any:
        """Return the value that the command prints with `--json`. Fail unless it has the documented type."""
        found = json.loads(self(*words, "--json").stdout)
        kind = type_of([*map(str, words)])
        assert kind is None or not [*misfits(found, kind)], [*misfits(found, kind)]
        return found

    def start(self, *words: object, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """The command, while it runs."""
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            self.argv(*words), env={**self.environment, **(env or {})}, cwd=self.folder, **(given | options)
        )

    def script(self, text: str, name: str = "src/train.py") -> str:
        """A script in the working directory; its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def submit(self, text: str, *words: object) -> str:
        """Start a run of this script, and return its id while it goes on."""
        return str(self("submit", *words, self.script(text)).stdout.strip())

    def run_folder(self, run_id: str) -> Path:
        return self.folder / ".paceline" / "runs" / run_id

    def wait(self, run_id: str, *states: str) -> str:
        """Return the run's state as soon as it is one of these states or the run has ended."""
        wanted = {*states, "Completed", "Failed", "Canceled"}
        deadline = time.monotonic() + 180
        while (status := self._stored(run_id)) not in wanted:
            assert time.monotonic() < deadline, f"waited in vain: {run_id} is {status}"
            time.sleep(0.01)
        return status

    def _stored(self, run_id: str) -> str:
        return str(json.loads((self.run_folder(run_id) / "state.json").read_text())["status"])

    def run_ids(self) -> list[str]:
        runs = self.folder / ".paceline" / "runs"
        # A name that begins with a dot is the folder of an incomplete run.
        return sorted(name for name in os.listdir(runs) if name[0] != ".") if runs.exists() else []

    @staticmethod
    def argv(*words: object) -> list[str]:
        assert PROGRAM, "paceline is not installed beside this Python: pip install -e ."
        return [PROGRAM, *map(str, words)]


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """A fresh working directory. In the end no process of its runs may be left."""
    yield Cli(tmp_path)
    deadline = time.monotonic() + 90
    while (left := processes_below(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        processes.send(pid, 9)
    assert not left, f"left behind (and killed now): {left}"


class Gallery(Cli):
    """Ended runs for tests that only read. `good`: one worker, every kind of data. `bad`: two workers, rank 1 fails."""

    good = bad = ""


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    cli = Gallery(tmp_path_factory.mktemp("gallery"))
    good = """
        import os, sys, paceline
        run = paceline.Run.get_context()
        for step in range(8):
            run.log("loss", 1 / (1 + step))
        run.log("accuracy", 0.5)
        run.log("nan", float("nan"))
        open("outputs/model.txt", "w").write("model")
        for percent in range(0, 101, 20):
            sys.stdout.write(f"\\rprogress {percent}%")
        sys.stdout.write("\\n")
        print("done", file=sys.stderr)
        sys.stdout.buffer.write(b"\\xff\\n")
    """
    cli.good = cli("submit", "-e", "good", "--tag", "a=1", "--tag", "bare", cli.script(good)).stdout.strip()
    bad = """
        import os, time
        print("hello")
        if os.environ["PACELINE_RANK"] == "0":
            open("outputs/there", "w")
            time.sleep(600)
        while not os.path.exists("outputs/there"):
            time.sleep(0.01)
        raise ValueError("bad batch")
    """
    cli.bad = cli("submit", "-e", "bad", "-j", "2", "--backend", "gloo", cli.script(bad)).stdout.strip()
    assert (cli.wait(cli.good), cli.wait(cli.bad)) == ("Completed", "Failed")
    return cli
