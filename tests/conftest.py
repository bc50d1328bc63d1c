"""Every test runs in a folder of its own, under none of the machine's settings, and leaves no process behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("paceline", database=None, deadline=None)
settings.load_profile("paceline")

# A shell starts background jobs with SIGINT ignored, and so does nohup. Processes that the tests start would inherit this.
# Restore the default, because tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Let started processes read and write .pyc files, even if the shell forbids it. Without them, each supervisor and worker would
# compile all modules that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Waiting threads of OpenMP spin by default, which takes cores from other tests. Passive waiting reduced two commands of the
# README from 147 to 60 CPU seconds.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

#: Prefixes of variables that a developer's shell, a batch system or a launcher may have set. Tests remove such variables.
_PREFIXES = ("PACELINE_", "AML_", "AZUREML_", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC_", "HOROVOD_", "JAX_")
_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
        *(
            "PYTHONPATH",
            "PYTHONSAFEPATH",
            "PYTHONWARNINGS",
            *("FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"),
            # The tests' servers run on this machine, so requests must not use a proxy.
            *("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
            "PYTHONUNBUFFERED",
            "PYTHONFAULTHANDLER",
            "PYTHONHASHSEED",
            "GIT_DIR",
            "GIT_WORK_TREE",
            "GIT_INDEX_FILE",
            "GIT_PREFIX",
        ),
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-durations",
        action="store_true",
        help="write what each unit of tests took to tests/durations.json, by which the longest is handed out first",
    )
    parser.addoption("--quick", action="store_true", help="run the tests alone that start no process (`make check`)")


#: Key of the data that the main pytest process shares with its worker processes.
SHARED = pytest.StashKey[Any]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    from tests.warm.sharing import Sharing

    if SHARED not in node.config.stash:
        node.config.stash[SHARED] = Sharing()
    node.workerinput["warm"] = node.config.stash[SHARED].folder


def pytest_unconfigure(config: pytest.Config) -> None:
    # Freeze all objects, because pytest and the exiting interpreter collect garbage several times. With torch that takes seconds.
    gc.collect()
    gc.freeze()
    if shared := config.stash.get(SHARED, None):
        shared.close()


def pytest_configure(config: pytest.Config) -> None:
    from paceline.system.lazy_import import load_triton_before_tensorflow

    if config.getoption("--quick"):
        from tests.quick import NoProcesses

        config.pluginmanager.register(NoProcesses())

    # Load triton first, because later tests may load TensorFlow and torch._dynamo into this process.
    load_triton_before_tensorflow()
    if shared := getattr(config, "workerinput", {}).get("warm"):
        from tests.warm import sharing

        sharing.folder = Path(shared)
    # If pytest has worker processes, only the main process receives the results of all tests.
    if config.getoption("--keep-durations") and not hasattr(config, "workerinput"):
        if not all(Path(arg).is_dir() for arg in config.args) or config.getoption("keyword"):
            raise pytest.UsageError(
                "--keep-durations measures whole units: name folders, not files or tests, and no -k"
            )
        config.pluginmanager.register(Durations(config))


#: Whether NVIDIA's driver is loaded.
HAS_GPU = Path("/dev/nvidiactl").exists()

#: Whether to run tests marked `proof`. Read this variable on import, because a fixture later removes it from the environment.
IS_PROOF = bool(os.environ.get("PACELINE_PROOF"))


#: The ids of all collected tests, including deselected tests.
COLLECTED = pytest.StashKey[frozenset[str]]()


# Run this hook first, before -k or -m deselect any tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests import crossed
    from tests.side_by_side import kept_durations, longest_first

    # Check that the tests in crossed.py exist. If a test is given by its id, pytest does not collect that test's other
    # parameter values, so the check would fail.
    if not any("::" in arg for arg in config.args) and (found := crossed.unknown(item.nodeid for item in items)):
        raise pytest.UsageError(f"tests/crossed.py names what is not there: {found}")
    for item in items:
        if crossed.is_left_to_proof(item.nodeid):
            item.add_marker(pytest.mark.proof)
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    if not IS_PROOF:
        left_out = [item for item in items if item.get_closest_marker("proof")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("proof")]
    items[:] = longest_first(items, kept_durations())


#: These packages take seconds to load and stay in each process that collects tests, so collecting must not load them.
_HEAVY = frozenset({"torch", "tensorflow", "transformers", "keras", "ray", "mlflow", "pandas", "sklearn"})


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    before = _HEAVY & sys.modules.keys()
    report = yield
    if found := sorted(_HEAVY & sys.modules.keys() - before):
        report.outcome = "failed"
        report.longrepr = f"collecting it loads {found}: use tests.late, or load it in the test"
    return report


#: With Python's default of (700, 10, 10), garbage collection took a fourth of the CPU time of small tests.
GC_THRESHOLD = (10_000, 50, 1_000)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    from tests.side_by_side import compile_own_share

    # Collecting tests creates objects that stay alive. So disable garbage collection meanwhile, and then freeze the objects,
    # which also keeps them shared with forked processes.
    gc.disable()
    try:
        compile_own_share(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.side_by_side import ByUnit

    return ByUnit(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    from tests.side_by_side import end_with_crash

    if error and error != "keyboard-interrupt":
        end_with_crash(node)


class Durations:
    """Adds up the times of the tests of each unit, with their fixtures, and writes the sums in the end."""

    def __init__(self, config: pytest.Config) -> None:
        # If the command line names no tests, all tests run.
        self._is_whole = list(config.args) == list(config.getini("testpaths"))
        self._measured: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from tests.side_by_side import unit_of

        unit = unit_of(report.nodeid)
        self._measured[unit] = self._measured.get(unit, 0.0) + report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        from tests.side_by_side import DURATIONS, keep_durations

        # An interrupted session has not measured all tests, so don't store its times.
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            keep_durations(DURATIONS, self._measured, is_whole=self._is_whole)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, the leases and the state folder of each test are in its `tmp_path`."""
    for name in list(os.environ):
        if name in _NAMES or name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    # Several ranks of one test would share a GPU, which NCCL refuses. `make gpu` runs the tests that need GPUs.
    if HAS_GPU:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(tmp_path / "data-cache"))
    if not os.environ.get("HOME"):
        monkeypatch.setenv("HOME", os.path.expanduser("~"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose path may have 107 bytes: `tmp_path` may be longer."""
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if sys.platform == "linux" else None
    if done is None or done.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip() if done else 'not on this system'}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No supervisor, worker or server that a test started outlives the tests; seen in the environment it was started with."""
    base = tmp_path_factory.getbasetemp()
    yield
    if not sys.platform.startswith("linux"):
        return
    deadline = time.monotonic() + 60
    while (left := _of_runs_below(base)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes of runs were left behind (and are killed now): {left}"


@pytest.fixture(scope="session", autouse=True)
def warm_programs_end() -> Iterator[None]:
    yield
    if warm := sys.modules.get("tests.warm"):
        warm.close_all()


_MARKS = (b"PACELINE_RUN_DIR=", b"PACELINE_SUPERVISOR=", b"PACELINE_SERVICE_DIR=")


def _of_runs_below(base: Path) -> dict[int, str]:
    """pid -> command line of each living process that belongs to a run or a service below `base`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            if not any(mark in environment for mark in _MARKS):
                continue
            if os.fsencode(base) in environment:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace")
        except OSError:
            continue
    return found
