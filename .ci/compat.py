"""The tests of what needs torch, on every release of torch and of Python that is served; the table in docs/versions.md.

    make compat                                     all of it, each cell in an environment of its own
    make compat COMPAT="2.15.0 2.13.0@3.12"         these alone: torch, or torch@Python
    make compat COMPAT_AT_ONCE=2                    two cells at a time

Each environment is made as a user makes one (`pip install`, from the package index), in a temporary folder, and is removed as
soon as its tests have run: with CUDA it has 5 to 8 GB. The table is written after each cell, so that a run that is stopped
keeps what it has. A Python that isn't there is skipped by its name. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by `make compat`: begin -->", "<!-- made by `make compat`: end -->"

#: The last patch of each minor release that is served, newest first.
TORCH = ("2.15.0", "2.14.1", "2.13.0", "2.12.1", "2.11.0", "2.10.0", "2.9.1")
#: On the first one every torch is run, on the others the newest.
PYTHON = ("3.11", "3.10", "3.12", "3.13")

#: Column -> which tests count in it: a pattern of "file::test". Tests that match none are not run: two ranks show what a
#: release has changed, of collectives three, and four the products of strategies, which are in the checks of pipelines.
COLUMNS = {
    "DataParallel, FullyShard": (
        r"parallel/test_on_ranks\.py::.*\[(average|data|fitting|forecasts|large|loop|loss_table|losses|mutations|optimizers|reads|silent|statistics)\..*-2\]"
    ),
    "PipelineParallel, products": (
        r"parallel/test_on_ranks\.py::.*\[((pipeline|stages|mutations_cut|kinds|families|torchvisions)\..*-2|pipeline\..*-4)\]"
    ),
    "TensorParallel": r"parallel/test_on_ranks\.py::.*\[(tensor|context|experts)\..*-2\]",
    "checkpoints": r"parallel/test_on_ranks\.py::.*\[checkpoint\..*-2\]",
    "`mpi`": r"torch_mpi/(test_group\.py::.*\[3-|test_models\.py::.*\[2-ranks|test_(backend|world)\.py::)",
    "Horovod": r"horovod/test_on_gloo\.py::|horovod/test_on_ranks\.py::.*\[3-",
    "examples": r"parallel/test_examples\.py::",
    "private parts": r"tests/test_torch_private\.py::",
}
FILES = (
    *("tests/parallel/test_on_ranks.py", "tests/parallel/test_examples.py", "tests/test_torch_private.py"),
    *("tests/torch_mpi", "tests/compat/horovod/test_on_ranks.py", "tests/compat/horovod/test_on_gloo.py"),
)
#: What the tests need beside the package itself.
TOOLS = (
    *("pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "torchdata>=0.10"),
    *("peft>=0.21", "transformers>=5.20,<6"),
)
#: Of what a test that fails says.
_LINES_TOLD = 30
HEADINGS = ("torch", "Python", "result", "run on")


@dataclass(frozen=True)
class Cell:
    """One release of torch on one Python."""

    torch: str
    python: str


@dataclass
class Found:
    """What the tests of one column came to."""

    passed: int = 0
    skipped: int = 0
    #: The tests that failed, with the end of what each said.
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.failed:
            return f"**{len(self.failed)} of {self.passed + len(self.failed)} failed**"
        return "ok" if self.passed else "not run"


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    remove_left_folders(Path(tempfile.gettempdir()))
    cells, absent = chosen(os.environ.get("COMPAT", "").split())
    for python in absent:
        print(f"Python {python}: not here (no python{python} on the PATH or below pyenv); left out", flush=True)
    failed = []
    with ThreadPoolExecutor(int(os.environ.get("COMPAT_AT_ONCE") or 1)) as pool:
        waiting = [pool.submit(run, cell, interpreter) for cell, interpreter in cells]
        try:
            for future in waiting:
                failed += future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise
    print("\n".join(failed) if failed else f"{len(cells)} cells, all tests passed")
    return 1 if failed else 0


def chosen(words: list[str]) -> tuple[list[tuple[Cell, str]], list[str]]:
    """The cells with their interpreters, and the Pythons that are not here. words: `torch` or `torch@Python`; none are all."""
    if words:
        wanted = [Cell(torch, python or PYTHON[0]) for torch, _, python in (word.partition("@") for word in words)]
    else:
        wanted = [Cell(torch, PYTHON[0]) for torch in TORCH]
        # torch 2.15 has no wheel for Python 3.10.
        wanted += [Cell(TORCH[1] if python == "3.10" else TORCH[0], python) for python in PYTHON[1:]]
    found = {python: interpreter(python) for python in dict.fromkeys(cell.python for cell in wanted)}
    cells = [(cell, path) for cell in wanted if (path := found[cell.python]) is not None]
    return cells, [python for python, path in found.items() if path is None]


def interpreter(python: str) -> str | None:
    """An interpreter of this minor version, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(f"python{python}"), *sorted(map(str, pyenv.glob(f"{python}.*/bin/python")))]
    ask = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        # A shim may be there and start nothing.
        done = subprocess.run([place, "-c", ask], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == python:
            return place
    return None


def run(cell: Cell, python: str) -> list[str]:
    """The tests that failed in this cell; its row is in the table then."""
    name = f"torch {cell.torch} on Python {cell.python}"
    folder = Path(tempfile.mkdtemp(prefix=f"paceline-compat-{os.getpid()}-"))
    begin = time.monotonic()
    try:
        build = install(cell, python, folder)
        columns = test(folder)
    except subprocess.CalledProcessError as error:
        if _stopped.is_set():
            return []
        print(f"{name}: {error.output[-2000:]}", flush=True)
        return [f"{name}: could not be installed or run: {' '.join(map(str, error.cmd))[:200]}"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    add_row(TABLE, row(build, cell.python, columns, time.strftime("%Y-%m-%d")))
    # Tests of one world of ranks fail of one cause: each cause is told once.
    for said, test_id in {
        said: test_id for found in columns.values() for test_id, said in found.failed.items()
    }.items():
        print(f"{name}: {test_id}\n{said}\n", flush=True)
    told = ", ".join(f"{column}: {found}" for column, found in columns.items())
    print(f"{name} ({build}), {time.monotonic() - begin:.0f} s: {told}", flush=True)
    return [f"{name}: {test_id}" for found in columns.values() for test_id in found.failed]


def install(cell: Cell, python: str, folder: Path) -> str:
    """Make the environment, with a copy of the working tree in it; torch's whole version, as `2.15.0+cu132`."""
    tree = folder / "tree"
    tracked = execute("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for path in filter(None, tracked):
        if (ROOT / path).is_file():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tree / path)
    execute(python, "-m", "venv", folder / "venv")
    pip = (folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir")
    execute(*pip, "--upgrade", "pip")
    execute(*pip, f"torch=={cell.torch}")
    # The pin again: where other packages' versions conflict at first, pip tries every release of torch.
    execute(*pip, f"torch=={cell.torch}", "--editable", f"{tree}[torch,mpi,examples]", *TOOLS)
    ask = "import torch; print(torch.__version__)"
    return execute(folder / "venv/bin/python", "-W", "ignore", "-c", ask).split()[-1]


def test(folder: Path) -> dict[str, Found]:
    """Column -> what came of its tests, run in this environment."""
    pytest = (folder / "venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider")
    listed = execute(*pytest, "--collect-only", "-q", *FILES, cwd=folder / "tree")
    (folder / "tests.txt").write_text("\n".join(line for line in listed.splitlines() if column_of(line)))
    report = folder / "report.xml"
    options = ("-q", "-n", "2", f"--junitxml={report}", "-o", "junit_family=xunit1", f"@{folder / 'tests.txt'}")
    # It fails where a test does; the report says which.
    told = execute(*pytest, *options, cwd=folder / "tree", check=False)
    if not report.exists():
        raise subprocess.CalledProcessError(1, "pytest", told)
    return read_report(report.read_text())


def column_of(test_id: str) -> str | None:
    """The column of a test, named as pytest lists it."""
    return next((column for column, pattern in COLUMNS.items() if re.search(pattern, test_id)), None)


def read_report(text: str) -> dict[str, Found]:
    """Column -> what came of its tests, from pytest's JUnit report (family xunit1, which names files)."""
    columns = {column: Found() for column in COLUMNS}
    for case in ElementTree.fromstring(text).iter("testcase"):
        test_id = f"{case.get('file')}::{case.get('name')}"
        column = column_of(test_id)
        if column is None:
            continue
        found = columns[column]
        failure = case.find("failure")
        failure = case.find("error") if failure is None else failure
        if failure is not None:
            found.failed[test_id] = "\n".join((failure.text or "").splitlines()[-_LINES_TOLD:])
        elif case.find("skipped") is not None:
            found.skipped += 1
        else:
            found.passed += 1
    return columns


# The table.


def row(build: str, python: str, columns: dict[str, Found], date: str) -> tuple[str, ...]:
    others = [f"{name}: {found}" for name, found in columns.items() if str(found) != "ok"]
    return (build, python, "; ".join(others) or "ok", date)


_writing = threading.Lock()


def add_row(path: Path, new: tuple[str, ...]) -> None:
    """Put this row into the page's table, in the place of the one for the same torch and Python."""
    with _writing:
        text = path.read_text()
        before, _, rest = text.partition(BEGIN)
        table, _, after = rest.partition(END)
        rows = {_key(one): one for one in [*rows_of(table), new]}
        lines = [HEADINGS, ("---",) * len(HEADINGS), *(rows[key] for key in sorted(rows, reverse=True))]
        made = "\n".join(f"| {' | '.join(line)} |" for line in lines) + not_run(rows.values())
        beside = path.with_suffix(".new")
        beside.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
        beside.replace(path)


def not_run(rows: Iterable[tuple[str, ...]]) -> str:
    """What has no row in the table, as a sentence below it; nothing if all has."""
    done = [one[:2] for one in rows]
    missing = [f"torch {minor(release)}" for release in TORCH if minor(release) not in {minor(own) for own, _ in done}]
    missing += [f"Python {python}" for python in PYTHON if python not in {own for _, own in done}]
    return f"\n\nNot run yet: {', '.join(missing)}." if missing else ""


def minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def rows_of(text: str) -> list[tuple[str, ...]]:
    """The rows of the table between the marks, without its headings."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    return [tuple(cell.strip() for cell in line) for line in lines[2:]]


def _key(one: Iterable[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    build, python, *_ = one
    # 2.13.0+cpu takes the place of 2.13.0+cu130: what differs is not what is compared.
    release = build.partition("+")[0]
    return tuple(map(int, release.split("."))), tuple(map(int, python.split(".")))


# Processes.

_running: set[subprocess.Popen[str]] = set()
_stopped = threading.Event()


def execute(*command: object, cwd: Path | None = None, check: bool = True) -> str:
    """What the command prints; it has a session of its own, so that all of it can be ended."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "PYTHON"))}
    # With the cells that `make test` leaves out.
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PACELINE_PROOF": "1"}
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _running.add(process)
    try:
        output, _ = process.communicate()
    finally:
        _running.discard(process)
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(map(str, command)), output)
    return output


def stop_all() -> None:
    """End what runs; each cell then removes its folder."""
    _stopped.set()
    for process in list(_running):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def remove_left_folders(temporary: Path) -> None:
    """Remove the environments of runs that were killed."""
    for folder in temporary.glob("paceline-compat-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
