"""The warm spare: the modules that it loads and omits, and the workers that it forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.system import processes, spare_client
from tests.helpers import run_python, wait_until
from tests.sources import SOURCE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="spares need Linux")

MAIN = str(SOURCE / "worker" / "__main__.py")
#: This script prints which packages were loaded before it, its rank, its working directory and its arguments.
SCRIPT = """
import json, os, sys
loaded = [name for name in ("looking", "fine", "threaded", "ranked", "parent", "without", "own") if name in sys.modules]
print(json.dumps({"loaded": loaded, "rank": os.environ["RANK"], "folder": os.getcwd(), "arguments": sys.argv[1:]}))
sys.exit(7)
"""


class Spare:
    """A spare, with the packages of `packages` installed beside it."""

    def __init__(self, folder: Path, packages: dict[str, str], *, own: str | None = None) -> None:
        self.folder, self.path = folder, str(folder / "spare_0")
        (folder / "attempts" / "1").mkdir(parents=True)
        installed = folder / "lib" / "site-packages"
        installed.mkdir(parents=True)
        lines = []
        for name, code in packages.items():
            (installed / f"{name}.py").write_text(code)
            lines.append(f"{name}\t{installed / f'{name}.py'}\n")
        if own is not None:
            (folder / "own.py").write_text(own)
            lines.append(f"own\t{folder / 'own.py'}\n")
        Path(spare_client.modules_of(self.path)).write_text("".join(lines))
        self.environment = {
            **os.environ,
            "PACELINE_SPARE": self.path,
            "PACELINE_RUN_DIR": str(folder),
            "PACELINE_ATTEMPT": "1",
            "PYTHONPATH": f"{SOURCE.parent}{os.pathsep}{installed}{os.pathsep}{folder}",
        }
        self.process = subprocess.Popen([sys.executable, MAIN, "--spare", "--", "x.py"], env=self.environment)
        wait_until(lambda: os.path.exists(spare_client.socket_of(self.path)), "the spare listens")

    def report(self) -> dict[str, Any]:
        wait_until((self.folder / "attempts" / "1" / "spare_0.json").exists, "the spare reports")
        return dict(json.loads((self.folder / "attempts" / "1" / "spare_0.json").read_text()))

    def result(self, *words: str) -> dict[str, Any]:
        """Run the script in a fork, which this process adopts. Return its output and exit code."""
        (self.folder / "train.py").write_text(SCRIPT)
        environment = {**self.environment, "RANK": "3", "PACELINE_RANK": "3"}
        with (self.folder / "output").open("w+") as output:
            argv = [sys.executable, MAIN, "--", "train.py", *words]
            ask = [self.path, argv, environment, str(self.folder)]
            code = (
                "import json, os, sys; from paceline.system import processes, spare_client\n"
                "processes.become_subreaper()\n"
                "pid, _ = spare_client.ask(*json.loads(sys.argv[1]), (0, 1, 2))\n"
                "os.environ.clear()\n"
                "import time\n"
                "while os.path.exists(f'/proc/{pid}') and processes.is_alive(pid): time.sleep(0.01)\n"
            )
            subprocess.run(
                [sys.executable, "-c", code, json.dumps(ask)],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=True,
            )
            output.seek(0)
            return dict(json.loads(output.read()))


@pytest.fixture
def spares() -> Iterator[list[Spare]]:
    made: list[Spare] = []
    yield made
    for spare in made:
        spare.process.kill()
        spare.process.wait()


def test_worker_forked_from_a_preloaded_process_has_its_own_rank_folder_and_arguments(
    tmp_path: Path, spares: list[Spare]
) -> None:
    spares.append(spare := Spare(tmp_path, {"fine": "x = 1"}))
    assert spare.result("--lr", "1") == {
        "loaded": ["fine"],
        "rank": "3",
        "folder": str(tmp_path),
        "arguments": ["--lr", "1"],
    }
    assert spare.report()["skipped"] == {}
    assert spare.report()["memory_bytes"] > 0


def test_packages_that_are_not_safe_to_fork_are_not_preloaded_and_the_reason_is_reported(
    tmp_path: Path, spares: list[Spare]
) -> None:
    packages = {
        "threaded": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "ranked": "import os; rank = os.environ.get('RANK')",
        "parent": "import subprocess; child = subprocess.Popen(['sleep', '600'])",
        "without": "try:\n    import threaded\nexcept ImportError:\n    pass",
        "looking": "import importlib.util\nhas_it = importlib.util.find_spec('threaded') is not None",
        "fine": "x = 1",
    }
    spares.append(spare := Spare(tmp_path, packages))
    try:
        assert spare.report()["skipped"] == {
            "threaded": "starts a thread while it loads",
            "ranked": "reads RANK while it loads",
            "parent": "starts a process while it loads",
            "without": "imports threaded",
        }
        assert spare.result()["loaded"] == ["looking", "fine"]
    finally:
        # The child that tried the package has started a `sleep`, which is ended here.
        for pid in processes.with_variable("PACELINE_RUN_DIR", str(tmp_path)):
            if processes.command_of(pid)[:1] == ["sleep"]:
                os.kill(pid, signal.SIGKILL)


def test_package_whose_import_starts_a_thread_is_left_out_of_preloading(tmp_path: Path, spares: list[Spare]) -> None:
    spares.append(spare := Spare(tmp_path, {"fine": "x = 1"}))
    later = tmp_path / "lib" / "site-packages" / "numpy_like.py"
    later.write_text("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
    with open(spare_client.modules_of(spare.path), "a") as file:
        file.write(f"numpy_like\t{later}\n")
    wait_until(lambda: "numpy_like" in spare.report()["skipped"], "the package is left out")
    assert spare.result()["loaded"] == ["fine"]


def test_preloaded_process_does_not_import_user_modules(tmp_path: Path, spares: list[Spare]) -> None:
    spares.append(spare := Spare(tmp_path, {"fine": "x = 1"}, own="raise SystemExit(9)"))
    assert spare.result()["loaded"] == ["fine"]


def test_fork_request_with_wrong_types_is_refused_and_the_preloaded_process_continues(
    tmp_path: Path, spares: list[Spare]
) -> None:
    spares.append(spare := Spare(tmp_path, {"fine": "x = 1"}))
    argv: Any = [1, 2]
    with pytest.raises(OSError, match="could not fork: the request has other types"):
        spare_client.ask(spare.path, argv, {}, "/", (0, 1, 2))
    assert spare.result()["rank"] == "3"


def test_fork_request_that_timed_out_starts_no_worker(tmp_path: Path, spares: list[Spare]) -> None:
    spares.append(spare := Spare(tmp_path, {"fine": "x = 1"}))
    (tmp_path / "late.py").write_text("open('ran', 'w').close()")
    os.kill(spare.process.pid, signal.SIGSTOP)
    environment = {**spare.environment, "PACELINE_RANK": "0"}
    try:
        with pytest.raises(OSError, match="the warm process is still loading"):
            spare_client.ask(spare.path, [sys.executable, MAIN, "--", "late.py"], environment, str(tmp_path), (0, 1, 2))
    finally:
        os.kill(spare.process.pid, signal.SIGCONT)
    # The spare answers connections in order, so it has handled the earlier one when it answers this one.
    assert spare.result()["rank"] == "3"
    assert not (tmp_path / "ran").exists()


def test_fork_request_without_a_preloaded_process_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no warm process is ready"):
        spare_client.ask(str(tmp_path / "spare_0"), ["python", "x"], {}, "/", (0, 1, 2))


def test_recorded_modules_include_imported_ones_but_not_those_only_found_by_find_spec(tmp_path: Path) -> None:
    code = (
        "import importlib.util, os\n"
        "from paceline.worker import spare\n"
        "spare.record()\n"
        "assert importlib.util.find_spec('csv')\n"
        "import colorsys\n"
        "import this_is_missing_never_mind\n"
    )
    script = f"try:\n    exec({code!r})\nexcept ImportError:\n    import fractions, statistics\n"
    path = str(tmp_path / "spare_0")
    run_python(script, environment={"PACELINE_SPARE": path, "LOCAL_RANK": "0"})
    names = [line.split("\t")[0] for line in Path(spare_client.modules_of(path)).read_text().splitlines()]
    assert "colorsys" in names
    assert "csv" not in names


def test_import_hook_of_the_script_runs_for_a_module_loaded_before_the_fork() -> None:
    code = (
        "import sys, types\n"
        "from paceline.system import lazy_import\n"
        "first, second = types.ModuleType('first'), types.ModuleType('second')\n"
        "first.call = second.call = lambda: 'old'\n"
        "sys.modules |= {'first': first, 'second': second}\n"
        "def change(module): module.call = lambda: 'new'\n"
        "lazy_import.when_loaded('first', change)\n"
        "assert first.call() == 'old'\n"
        "lazy_import.take_loaded()\n"
        "lazy_import.when_loaded('first', change)\n"
        "print(first.call(), second.call())\n"
    )
    assert run_python(code) == "new new\n"
