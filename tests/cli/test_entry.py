"""What `run` can run beside a Python script: a module, and any other program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.engines.conftest import require_engine
from tests.engines.lab import SYSTEM, WHEEL, find_mpirun

BACKENDS = [(None, "1"), ("gloo", "2"), ("mpi", "2")]


def need(backend: str | None) -> list[str]:
    if backend == "mpi":
        require_engine("Open MPI", find_mpirun(WHEEL) or find_mpirun(SYSTEM))
    return ["--backend", backend] if backend else []


@pytest.mark.promise("module-program-binary-run-too")
@pytest.mark.parametrize(("backend", "processes"), BACKENDS)
def test_paceline_run_with_m_executes_a_module_in_the_same_way_as_python_m(
    cli: Cli, backend: str | None, processes: str
) -> None:
    text = """
        import os, sys
        import pickle
        from .part import twice
        class Own: pass
        assert pickle.loads(pickle.dumps(Own)) is Own
        assert __name__ == "__main__" and __package__ == "pkg" and __spec__.name == "pkg.train"
        assert sys.argv[0] == __file__ and sys.path[0] == os.getcwd()
        print(os.environ["PACELINE_RANK"], twice(2), *sys.argv[1:])
        sys.exit(sys.argv[1:] == ["fail"] and 7)
    """
    cli.script(text, "pkg/train.py")
    cli.script("def twice(n): return 2 * n", "pkg/part.py")
    cli.script("raise KeyError('lost')", "other/__main__.py")
    words = ["run", "-q", "-j", processes, *need(backend)]
    done = cli(*words, "-m", "pkg.train", "--", "--a", "b")

    lines = sorted(line.partition("] ")[2] or line for line in done.stdout.splitlines())
    assert lines == [f"{rank} 4 --a b" for rank in range(int(processes))]
    failed = cli(*words, "-m", "pkg.train", "--", "fail", code=7)
    assert "left with exit code 7" in failed.stderr
    failed = cli(*words, "-m", "other", code=1)
    assert "KeyError: 'lost'" in failed.stderr
    assert "importlib" not in failed.stderr
    ids = cli.run_ids()
    assert "-m pkg.train --a b" in cli("show", ids[0]).stdout


def test_run_with_option_m_starts_an_installed_module_and_the_error_names_a_missing_one(cli: Cli) -> None:
    assert cli("run", "-q", "-m", "platform").stdout.startswith("Linux")
    failed = cli("run", "-q", "-m", "nowhere.at_all", code=1)
    assert "ModuleNotFoundError: no module 'nowhere.at_all' in the source folder or in the environment" in failed.stderr
    assert "importlib" not in failed.stderr
    assert cli.run_ids()[2:] == []
    cli.script("import nowhere", "src/lost/__init__.py")
    cli.script("", "src/lost/train.py")
    failed = cli("run", "-q", "-m", "lost.train", "--source", "src", code=1)
    assert "ModuleNotFoundError: No module named 'nowhere'" in failed.stderr
    assert "import nowhere" in failed.stderr


@pytest.mark.promise("module-program-binary-run-too")
@pytest.mark.parametrize(("backend", "processes"), BACKENDS)
def test_shell_script_gets_its_rank_and_its_exit_code_is_reported(
    cli: Cli, backend: str | None, processes: str
) -> None:
    text = """\
        #!/bin/sh
        echo "rank $PACELINE_RANK of $PACELINE_WORLD_SIZE: $1"
        test "$2" = kill && kill -9 $$
        echo "last words" >&2
        exit ${2:-0}
    """
    script = cli.script(text, "src/train.sh")
    (cli.folder / script).chmod(0o755)
    words = ["run", "-q", script, "-j", processes, *need(backend), "--"]
    done = cli(*words, "a 'b'")

    said = [f"rank {rank} of {processes}: a 'b'" for rank in range(int(processes))]
    lines = [re.sub(r"^\[rank \d\] ", "", line) for line in done.stdout.splitlines()]
    assert sorted(line for line in lines if line.startswith("rank")) == said
    failed = cli(*words, "x", "3", code=3).stderr
    assert "its process ended with exit code 3 and without an exception." in failed
    assert "    last words" in failed
    assert "Traceback" not in failed
    assert "killed by SIGKILL" in cli(*words, "x", "kill", code=137).stderr


def test_run_starts_a_binary_and_the_error_names_a_missing_interpreter_of_a_script(cli: Cli) -> None:
    (cli.folder / "src").mkdir()
    shutil.copy(str(shutil.which("echo")), cli.folder / "src" / "tool")
    assert cli("run", "-q", "src/tool", "--", "hello").stdout == "hello\n"
    (cli.folder / cli.script("#!/no/such/interpreter", "src/bad")).chmod(0o755)
    failed = cli("run", "-q", "src/bad", code=127)
    assert "    src/bad can't be run by /no/such/interpreter: No such file or directory." in failed.stderr


@pytest.mark.parametrize(("backend", "processes"), BACKENDS)
def test_installed_program_runs_in_a_copy_of_the_working_directory(
    cli: Cli, backend: str | None, processes: str
) -> None:
    cli.script("kept", "data.txt")
    done = cli("run", "-q", "-j", processes, *need(backend), "--", "cat", "data.txt")
    lines = [re.sub(r"^\[rank \d\] ", "", line) for line in done.stdout.splitlines()]
    assert lines == ["kept"] * int(processes)
    if backend is None:
        failed = cli("run", "-q", "false", code=1)
        assert "ended with exit code 1" in failed.stderr


def test_program_is_looked_up_in_the_runs_environment(cli: Cli) -> None:
    """On another machine or in an environment yet to be built, the program may exist; a mistyped script may not."""
    for name, said in (
        (
            "trian",
            f"'trian' is neither a program on the PATH of this machine nor a file in '{cli.folder}', which has train.py.",
        ),
        ("train.sh", "'train.sh' is neither a program on the PATH"),
        ("trian.py", "there is no script 'trian.py' here"),
        ("bin/cat", "there is no script 'bin/cat' here"),
        ("job.yml", "there is no script 'job.yml' here"),
    ):
        cli.script("", "train.py")
        assert said in cli("run", name, code=2).stderr
        assert cli.run_ids() == []
    assert "neither a program on the PATH" in cli("run", "trian", "--dry-run", code=2).stderr
    # `run cat` takes the file `cat` of the source folder before the system's program, and refuses it because it is text.
    cli.script("text", "cat")
    assert "or a binary" in cli("run", "cat", code=2).stderr
    own = cli.script("#!/bin/sh\necho own", "tools/own-tool")
    (cli.folder / own).chmod(0o755)
    path = f"{cli.folder / 'tools'}:{cli.environment['PATH']}"
    assert cli("run", "-q", "own-tool", env={"PATH": path}).stdout == "own\n"
    assert cli("run", "-q", "--env", f"PATH={path}", "own-tool").stdout == "own\n"


def test_program_missing_on_a_node_is_reported_by_the_node(cli: Cli) -> None:
    (cli.folder / "tools").mkdir()
    (cli.folder / cli.script("#!/bin/sh", "tools/own-tool")).chmod(0o755)
    path = f"{cli.folder / 'tools'}:{cli.environment['PATH']}"
    run_id = cli("submit", "own-tool", env={"PATH": path}).stdout.strip()
    assert cli.wait(run_id) == "Completed"
    failed = cli("rerun", "-q", run_id, code=127)
    assert f"there is no program 'own-tool' on the PATH of {os.uname().nodename}" in failed.stderr


def test_program_receives_the_signals_of_its_run(cli: Cli) -> None:
    text = "#!/bin/sh\ntrap 'echo ended; exit 0' TERM\ntouch outputs/there\nwhile :; do sleep 0.1; done"
    script = cli.script(text, "src/wait.sh")
    (cli.folder / script).chmod(0o755)
    run_id = cli("submit", script).stdout.strip()
    there = Path(cli.run_folder(run_id)) / "outputs" / "there"
    while not there.exists():
        assert cli.wait(run_id, "Running") == "Running"
    cli("cancel", "--wait", run_id)

    assert cli("logs", run_id).stdout == "ended\n"
    assert subprocess.run(["pgrep", "-f", str(there.parent)], check=False, capture_output=True).stdout == b""


def test_program_on_path_runs_despite_a_folder_of_the_same_name(cli: Cli) -> None:
    (cli.folder / "echo").mkdir()
    assert cli("run", "-q", "echo", "--", "hello").stdout == "hello\n"
    (cli.folder / "package").mkdir()
    assert "'package' is a folder" in cli("run", "package", code=2).stderr
