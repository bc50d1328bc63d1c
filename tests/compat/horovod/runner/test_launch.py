"""`horovodrun` as a program: the processes that it starts, its output and end; it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.system import processes
from tests.engines.conftest import require_engine
from tests.engines.lab import WHEEL, find_mpirun
from tests.helpers import wait_until, write_program
from tests.warm import TORCH, forking_variables

HOROVODRUN = [sys.executable, "-m", "paceline.compat.horovod.runner.launch"]


@pytest.fixture(params=["--mpi", "--gloo"])
def transport(request: pytest.FixtureRequest) -> str:
    """Under mpirun, and as plain processes."""
    if request.param == "--mpi":
        require_engine(WHEEL, find_mpirun(WHEEL))
    return str(request.param)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Open MPI of the wheel, which mpi4py is built for, and this interpreter as `python`."""
    if found := find_mpirun(WHEEL):
        monkeypatch.setenv("PACELINE_MPIRUN", found)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOROVODRUN, *map(str, words)], capture_output=True, text=True, timeout=300, check=False, **options
    )


def script(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_text("import json, os, signal, subprocess, sys, time\nrank = int(os.environ['HOROVOD_RANK'])\n" + text)
    return path


def lines(done: subprocess.CompletedProcess[str], rank: int, stream: str = "stdout") -> list[str]:
    text = done.stdout if stream == "stdout" else done.stderr
    prefix = f"[{rank}]<{stream}>:"
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


# --- tests of the environment of ranks


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel is not Linux")
def test_ranks_use_batch_scheduling_unless_the_variable_paceline_scheduling_is_normal(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = "import os; print(os.sched_getscheduler(0))"
    path = script(tmp_path, text)
    for command in (["python", path], ["python", "-c", text], ["sh", "-c", f'python -c "{text}"']):
        assert lines(run("--gloo", "-np", 1, *command), 0) == [str(os.SCHED_BATCH)]
    monkeypatch.setenv("PACELINE_SCHEDULING", "normal")
    assert lines(run("--gloo", "-np", 1, "python", path), 0) == [str(os.SCHED_OTHER)]


def test_each_rank_gets_its_arguments_working_directory_and_rank_variables(tmp_path, transport):
    path = script(tmp_path, "print(json.dumps([{k: v for k, v in os.environ.items()}, os.getcwd(), sys.argv]))")
    done = run(transport, "-np", 2, "-H", "localhost:1,127.0.0.1:1", "python", path.name, "--lr", "0.1", "a b", "-np")
    assert done.returncode == 0, done.stderr
    secrets: set[str] = set()
    for rank in range(2):
        found, folder, argv = json.loads(lines(done, rank)[0])
        assert folder == str(tmp_path)
        assert argv == ["train.py", "--lr", "0.1", "a b", "-np"]
        wanted = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": 2}
        assert {name: int(found[f"HOROVOD_{name}"]) for name in wanted} == wanted
        assert found["HOROVOD_HOSTNAME"] == ["localhost", "127.0.0.1"][rank]
        assert found["HOROVOD_CONTROLLER"] == transport.removeprefix("--")
        assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == (str(rank), "2", "127.0.0.1")
        assert found["MASTER_PORT"].isdigit()
        # A rank of horovodrun gets no variables of a Paceline worker or of its launcher.
        own = {name for name in found if name.startswith("PACELINE_")}
        assert own <= {"PACELINE_LEASES", "PACELINE_MPIRUN", "PACELINE_DATA_CACHE", "PACELINE_RUN_SECRET"}
        secrets.add(found["PACELINE_RUN_SECRET"])
    assert [len(secret) for secret in secrets] == [64], "one for all"


def test_ranks_have_the_users_environment_and_the_variables_of_options(tmp_path, transport, monkeypatch):
    monkeypatch.setenv("MINE", "a=1; $(x)\n'\"")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("RANK", "7")
    path = script(tmp_path, "print(json.dumps([os.environ.get(n) for n in ('MINE', 'HOROVOD_CYCLE_TIME', 'RANK')]))")
    done = run(transport, "-np", 1, "--cycle-time-ms", "2.5", "python", path)
    assert done.returncode == 0, done.stderr
    assert json.loads(lines(done, 0)[0]) == ["a=1; $(x)\n'\"", "2.5", "0"]


@pytest.mark.parametrize("option", ["--mpi-args", "--binding-args"])
def test_users_mpirun_arguments_replace_the_default_ones(option):
    """mpirun 5 refuses a mapping that is given twice, and its `-x` did not reach the ranks."""
    require_engine(WHEEL, find_mpirun(WHEEL))
    words = f"{option}=--map-by slot:OVERSUBSCRIBE --bind-to none", "--network-interface", "lo"
    done = run("--mpi", "-np", 2, *words, "sh", "-c", "echo $GLOO_SOCKET_IFNAME")
    assert (done.returncode, lines(done, 1)) == (0, ["lo"]), done.stderr


def test_variables_in_the_mpi_args_option_reach_the_ranks():
    require_engine(WHEEL, find_mpirun(WHEEL))
    done = run(
        "--mpi", "-np", 1, "--mpi-args=-x MINE='a b' -x PATH -x EMPTY=", "sh", "-c", "echo $MINE ${EMPTY-unset}."
    )
    assert lines(done, 0) == ["a b ."], done.stderr


def test_script_name_with_spaces_and_quotes_runs(tmp_path, transport):
    path = script(tmp_path, "print('here', *sys.argv[1:])", "my 'train' \"ü\".py")
    done = run(transport, "-np", 1, "python", "-u", path, ":", "--", "-x", "$HOME")
    assert lines(done, 0) == ["here : -- -x $HOME"], done.stderr


def test_program_other_than_python_runs_on_each_rank(transport):
    done = run(transport, "-np", 2, "sh", "-c", "echo $HOROVOD_RANK; exit $HOROVOD_RANK")
    assert (lines(done, 0), lines(done, 1), done.returncode) == (["0"], ["1"], 1)


# --- tests of the name `horovod` in scripts


def run_forked(*words: object) -> subprocess.CompletedProcess[str]:
    """The same, where the Pythons that ranks start are forked from one that has torch loaded, which they find when they import
    it."""
    return run(*words, env=os.environ | forking_variables(TORCH))


@pytest.mark.promise("script-written-horovod-runs")
def test_script_on_two_ranks_can_use_horovod(tmp_path):
    require_engine("torch and the Open MPI of the wheel", find_mpirun(WHEEL))
    path = script(
        tmp_path,
        "import horovod.torch as hvd, torch\nhvd.init()\n"
        "print(hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum).item())\n",
    )
    done = run_forked("-np", 2, "python", path)
    assert [lines(done, rank) for rank in range(2)] == [["0 2 1.0"], ["1 2 1.0"]], done.stderr


@pytest.mark.proof
def test_script_started_by_horovodrun_can_use_the_mpi_backend_of_torch_distributed(tmp_path):
    # Regression: torch raised its error that MPI is only included if PyTorch is built from source.
    require_engine("torch and the Open MPI of the wheel", find_mpirun(WHEEL))
    path = script(
        tmp_path,
        "import torch, torch.distributed as dist\ndist.init_process_group('mpi')\n"
        "one = torch.ones(1)\ndist.all_reduce(one)\nprint(dist.get_rank(), one.item())\n",
    )
    done = run("--mpi", "-np", 2, "python", path)
    assert [lines(done, rank) for rank in range(2)] == [["0 2.0"], ["1 2.0"]], done.stderr


@pytest.mark.parametrize("command", [["python", "-c", "import horovod; print(horovod.__name__)"], ["python", "w.py"]])
def test_horovod_is_importable_in_scripts_modules_and_their_child_processes(tmp_path, command):
    (tmp_path / "w.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import horovod; print(horovod.__name__)'])\n"
    )
    done = run("--gloo", "-np", 1, *command)
    assert lines(done, 0) == ["paceline.compat.horovod"], done.stderr


def test_script_imports_the_real_horovod_instead_of_the_alias_if_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("WHOSE = __name__ + ', real'\n")
    (tmp_path / "site" / "horovod" / "torch.py").write_text("import horovod\n")
    # Append the folder after Paceline's folder on the path, like site-packages.
    path = script(
        tmp_path, f"sys.path.append({str(tmp_path / 'site')!r})\nimport horovod.torch\nprint(horovod.WHOSE)\n"
    )
    done = run("--gloo", "-np", 1, "python", path)
    assert lines(done, 0) == ["horovod, real"], done.stderr


def test_second_install_of_the_horovod_alias_changes_nothing(tmp_path):
    path = script(
        tmp_path, "import paceline.compat as c; c.install('horovod'); import horovod; print(horovod.__name__)"
    )
    done = run("--gloo", "-np", 1, "python", path)
    assert lines(done, 0) == ["paceline.compat.horovod"], done.stderr


# --- tests of the ends of ranks


ENDS = [
    ("raise ValueError('bad batch')", 1, "ValueError: bad batch"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    ("sys.exit(7)", 7, "ended with exit code 7"),
    ("os._exit(3)", 3, "ended with exit code 3"),
]


@pytest.mark.promise("horovodrun-ends-code-first-rank")
@pytest.mark.parametrize(
    ("transport", "end", "code", "told"),
    [
        *(("--gloo", *end) for end in ENDS),
        # mpirun reports every exit code in the same way, so `make test` needs only one of them.
        *(pytest.param("--mpi", *end, marks=[pytest.mark.proof] if end[1] == 3 else []) for end in ENDS),
    ],
    indirect=["transport"],
)
def test_first_failed_rank_ends_the_others_and_sets_the_exit_code(tmp_path, transport, end, code, told):
    path = script(tmp_path, f"if rank == 1: {end}\ntime.sleep(600)")
    done = run(transport, "-np", 2, "python", path)
    assert done.returncode == code
    assert re.fullmatch(rf"horovodrun: rank 1 on \S+ failed first: .*{told}", done.stderr.splitlines()[-1])


def run_left_by_rank_1(tmp_path, exit_code):
    """The end of two ranks, of which one waits for the other in a collective."""
    require_engine("torch and the Open MPI of the wheel", find_mpirun(WHEEL))
    text = "import horovod.torch as hvd, torch\nhvd.init()\nif rank == 1: sys.exit(%d)\nhvd.allreduce(torch.ones(1))\n"
    return run_forked("-np", 2, "python", script(tmp_path, text % exit_code))


def test_failed_rank_is_named_and_not_the_rank_waiting_for_it(tmp_path):
    done = run_left_by_rank_1(tmp_path, 7)
    assert done.returncode == 7, done.stderr


def test_exit_code_of_a_script_is_kept_if_its_rank_is_stopped_during_its_exit_handlers(tmp_path, transport):
    # Regression: on a busy machine, rank 0 failed while rank 1 was still exiting with code 7. Then horovodrun ended
    # rank 1 by SIGTERM, and reported its exit code 143 instead of 7.
    path = script(
        tmp_path,
        "import atexit\n"
        "if rank == 1:\n    atexit.register(lambda: (open('leaving', 'w').close(), time.sleep(600)))\n    sys.exit(7)\n"
        "while not os.path.exists('leaving'): time.sleep(0.01)\nraise ConnectionError('Connection closed by peer')",
    )
    done = run(transport, "-np", 2, "python", path)
    assert done.returncode == 7, done.stderr
    assert "rank 1 on" in done.stderr.splitlines()[-1]
    assert "ended with exit code 7" in done.stderr.splitlines()[-1]


def test_rank_that_exits_early_with_0_is_named_in_the_error(tmp_path):
    # Regression: rank 1 had fewer batches than rank 0 and exited early, but the only message was "rank 0 failed first".
    done = run_left_by_rank_1(tmp_path, 0)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "rank 1 has shut down, at the end of its script or by its own call" in last
    assert "Before that, rank 1 had ended" in last


def test_rank_can_save_a_checkpoint_after_sigterm(tmp_path, transport):
    path = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), open('saved', 'w').close(), sys.exit(0)))\n"
        "if rank == 1:\n    while not os.path.exists('ready'): time.sleep(0.01)\n    sys.exit(4)\n"
        "open('ready', 'w').close()\ntime.sleep(600)",
    )
    done = run(transport, "-np", 2, "python", path)
    assert (done.returncode, (tmp_path / "saved").exists()) == (4, True)


def test_successful_job_exits_with_0_and_prints_no_message(tmp_path, transport):
    done = run(transport, "-np", 3, "python", script(tmp_path, "print(rank, end='')"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:{rank}" for rank in range(3)]


ALONE = """
import types

class Optimizer:
    def step(self): ...

# What torch leaves where a model was trained, and no rank has joined the others.
Optimizer.step.hooked = True
sys.modules["torch.optim.optimizer"] = types.ModuleType("torch.optim.optimizer")
sys.modules["torch.optim.optimizer"].Optimizer = Optimizer
"""


def test_horovodrun_exits_with_0_if_its_ranks_train_independently(tmp_path):
    # Regression: workers that train independently report this to their Paceline run. Without a run, they failed with
    # "KeyError: 'PACELINE_RUN_DIR'".
    done = run("--gloo", "-np", 2, "python", script(tmp_path, ALONE))
    assert (done.returncode, done.stderr) == (0, "")


WAITING = (
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "open(f'pids_{rank}.part', 'w').write(f'{os.getpid()} {child.pid}')\n"
    "os.rename(f'pids_{rank}.part', f'pids_{rank}')\ntime.sleep(600)\n"
)


@pytest.fixture
def waiting(tmp_path, transport) -> Callable[[], tuple[subprocess.Popen[str], list[int]]]:
    """Starts a job of two ranks that wait, each with a child in a session of its own; it, and all their pids."""

    def begin() -> tuple[subprocess.Popen[str], list[int]]:
        path = script(tmp_path, WAITING)
        words = [*HOROVODRUN, transport, "-np", "2", "python", str(path)]
        job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        files = [tmp_path / f"pids_{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files), "both ranks have started")
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        return job, [*pids, *processes.descendants(job.pid)]

    return begin


def gone(pids: list[int]) -> None:
    wait_until(lambda: not [pid for pid in pids if processes.is_alive(pid)], "all processes of the job are gone")


@pytest.mark.parametrize(
    ("transport", "number"),
    [
        ("--gloo", signal.SIGINT),
        ("--gloo", signal.SIGHUP),
        ("--mpi", signal.SIGTERM),
        pytest.param("--mpi", signal.SIGINT, marks=pytest.mark.proof),
        pytest.param("--mpi", signal.SIGHUP, marks=pytest.mark.proof),
        pytest.param("--gloo", signal.SIGTERM, marks=pytest.mark.proof),
    ],
    indirect=["transport"],
)
def test_a_signal_ends_all_ranks(waiting, number):
    job, pids = waiting()
    job.send_signal(number)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 128 + number
    assert f"stopped by {number.name}" in stderr
    gone(pids)


def folders() -> set[Path]:
    """Those that jobs keep while they run."""
    return {
        path for top in ("/dev/shm", tempfile.gettempdir()) for path in Path(top).glob("paceline-temp-horovodrun-*")
    }


@pytest.mark.promise("horovodrun-ends-code-first-rank")
def test_killed_horovodrun_leaves_no_processes_or_folders(waiting):
    before = folders()
    job, pids = waiting()
    assert folders() - before
    job.kill()
    job.communicate(timeout=120)
    gone(pids)
    wait_until(lambda: not folders() - before, "its folders are gone")


def test_job_ends_with_exit_code_137_if_the_parent_process_of_a_rank_is_killed(waiting):
    before = folders()
    job, pids = waiting()
    (parent,) = (line.split()[1] for line in Path(f"/proc/{pids[0]}/status").read_text().splitlines() if "PPid" in line)
    beside = int(parent)
    os.kill(beside, signal.SIGKILL)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 137
    assert "rank 0 on" in stderr.splitlines()[-1]
    gone(pids)
    # Tests in other processes also create such folders, so ignore the folders that existed before.
    wait_until(lambda: not folders() - before, "its folders are gone")


def test_closed_output_pipe_ends_the_job(tmp_path, transport):
    path = script(tmp_path, "while True: print('x' * 100)")
    job = subprocess.Popen([*HOROVODRUN, transport, "-np", "1", "python", str(path)], stdout=subprocess.PIPE)
    assert job.stdout is not None
    assert job.stdout.read(10) == b"[0]<stdout"
    below = processes.descendants(job.pid)
    job.stdout.close()
    assert job.wait(120) == 128 + signal.SIGPIPE
    gone(below)


# --- tests of output


def test_output_filename_option_also_writes_the_output_of_each_rank_to_files(tmp_path):
    path = script(tmp_path, "print('out', rank)\nprint('err', rank, file=sys.stderr)")
    done = run("--gloo", "-np", 2, "--output-filename", "logs", "-prefix-timestamp", "python", path)
    assert re.search(r"^\w+ \w+ +\d+ [\d:]{8} \d{4}\[1\]<stdout>:out 1$", done.stdout, re.MULTILINE)
    found = [
        (tmp_path / "logs" / f"rank.{rank}" / name).read_text() for rank in range(2) for name in ("stdout", "stderr")
    ]
    assert found == ["out 0\n", "err 0\n", "out 1\n", "err 1\n"]


def test_large_output_of_several_ranks_is_not_mixed_within_lines(tmp_path, transport):
    path = script(tmp_path, "for number in range(20000): print(rank, number, 'x' * 50)")
    done = run(transport, "-np", 2, "python", path)
    for rank in range(2):
        assert lines(done, rank) == [f"{rank} {number} {'x' * 50}" for number in range(20000)]


def test_log_level_option_shows_the_engines_messages(tmp_path):
    path = script(tmp_path, "import horovod, logging\nlogging.getLogger('paceline.collectives').debug('mine')\n")
    done = run("--gloo", "-np", 1, "--log-level", "DEBUG", "--log-without-timestamp", "python", path)
    assert lines(done, 0, "stderr") == ["[DEBUG] [0] mine"]
    assert run("--gloo", "-np", 1, "--log-level", "INFO", "python", path).stderr == ""


# --- tests of invalid calls


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["python", "x.py"], 2, "-np N is missing"),
        (["-np", "2"], 2, "there is no command"),
        (["-np", "4", "-H", "localhost:2", "true"], 2, "-np 4 needs as many slots, but localhost:2 has 2"),
        (["-np", "1", "-H", "nowhere.invalid:1", "true"], 2, "the host 'nowhere.invalid' is not known here"),
        (["-np", "2", "--min-np", "3", "true"], 2, "--min-np 3, -np 2: they have to grow in this order"),
        (["-np", "2", "--max-np", "1", "true"], 2, "--min-np 2, -np 2, --max-np 1: they have to grow in this order"),
        (["-np", "2", "--host-discovery-script", "./d.sh", "true"], 2, "'./d.sh' ended with exit code 127"),
        (["-np", "2", "--host-discovery-script", "/bin/false", "true"], 2, "/bin/false' ended with exit code 1"),
        (["-np", "2", "--blacklist-cooldown-range", "9", "1", "true"], 2, "the smaller number first"),
        (["-np", "2", "--jsrun", "true"], 2, "--jsrun is not supported"),
        (["-np", "1", "-i", "no-key", "true"], 2, "--ssh-identity-file 'no-key' is not a file"),
        (["-np", "1", "--mpi", "--mpi-args='", "true"], 2, "can't be split into words"),
        (["-np", "1", "--gloo", "no-such-program"], 127, "there is no program 'no-such-program' on host"),
        (["-np", "1", "--gloo", "/etc/passwd"], 127, "'/etc/passwd' can't be started"),
    ],
)
def test_invalid_horovodrun_command_line_prints_the_reason_without_traceback_and_sets_the_exit_code(words, code, told):
    done = run(*words)
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_that_mpirun_cannot_start_are_named_with_its_error_text():
    require_engine(WHEEL, find_mpirun(WHEEL))
    done = run("--mpi", "-np", 2, "--mpi-args=--no-such-option", "true")
    assert done.returncode == 1
    assert re.search(r"ranks 0, 1 on localhost could not be started: mpirun ended with exit code \d+", done.stderr)
    assert "no-such-option" in done.stderr


def test_ranks_missing_at_the_start_timeout_are_named(tmp_path):
    fake = write_program(
        tmp_path / "mpirun", "#!/bin/sh\n[ $1 = --version ] && echo '(Open MPI) 5.0.1' || exec sleep 60\n"
    )
    done = run("--mpi", "-np", 2, "--start-timeout", "0.5", "true", env=os.environ | {"PACELINE_MPIRUN": str(fake)})
    assert done.returncode == 1
    assert "ranks 0, 1 on localhost did not come up within --start-timeout 0.5 s" in done.stderr


def test_options_without_effect_are_reported_once():
    done = run("--gloo", "-np", 2, "--num-nccl-streams", 2, "true")
    assert done.returncode == 0
    assert done.stderr == "horovodrun: without effect here: --num-nccl-streams: " + (
        "the engine has one stream for each process set.\n"
    )


def test_horovodrun_version_option_prints_the_version_and_cb_option_the_available_frameworks():
    assert run("--version").stdout == "0.28.1\n"
    told = run("-cb").stdout
    assert "Available Frameworks:" in told
    assert re.search(r"\[[X ]\] PyTorch", told)
