"""Wrong calls are refused with exit code 2, and with a message that names the value, the rule and the next step."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from paceline.cli.parser import VerbCommand, VerbGroup, app
from paceline.cli.verbs import VERBS
from tests.cli.conftest import Cli, Gallery

InProcess: TypeAlias = Callable[..., str]


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    """Call the command line in this process, which is faster than a new one for each call, and return its error message."""
    main = importlib.import_module("paceline.cli.main")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_WORKSPACE", raising=False)
    monkeypatch.setattr(main, "_log_to_standard_error", lambda: None)
    (tmp_path / "t.py").write_text("def init(): ...\ndef run(data): ...\n")

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        assert main._exit_code() == 2
        return capsys.readouterr().err.removeprefix("paceline: error: ")

    return call


WRONG = {
    "a script that is not there": (
        ["run", "none.py"],
        "there is no script 'none.py' here ({folder}). Give the path of a Python file.",
    ),
    "a folder": (["run", "src"], "'src' is a folder. Name the Python file in it that is to run."),
    "no Python file and no program": (
        ["run", "src/data.txt"],
        "'src/data.txt' must be a Python file (.py), a script that begins with #!, or a binary",
    ),
    "a program that is not executable": (
        ["run", "src/run.sh"],
        "script 'src/run.sh' is not executable. Make it so: chmod +x {folder}/src/run.sh",
    ),
    "a module that is not there": (
        ["run", "-m", "sub.b", "--source", "src"],
        "--module 'sub.b' is not in '{folder}/src', which has 'sub'. Did you mean sub.a?",
    ),
    "a package that is not a program": (
        ["run", "-m", "sub", "--source", "src"],
        "--module 'sub' is a package without a __main__.py.",
    ),
    "a script and a module": (["run", "src/train.py", "-m", "sub.a"], "'src/train.py' and -m sub.a: only one can run."),
    "a module's path": (["run", "-m", "src/train.py"], "--module 'src/train.py' is not a module's name."),
    "no script at all": (["run"], "name what to run: a script (paceline run train.py), a module (paceline run -m"),
    "nodes the wrong way round": (
        ["run", "src/train.py", "-j", "4..2x2", "--backend", "gloo"],
        "-j '4..2x2': the fewest nodes come first. Write -j 2..4x2.",
    ),
    "no node at all": (
        ["run", "src/train.py", "-j", "0..3x1", "--backend", "gloo"],
        "-j '0..3x1': a run has at least one node. Write -j 1..3x1.",
    ),
    "nodes without their processes": (
        ["run", "src/train.py", "-j", "2..4", "--backend", "gloo"],
        "-j '2..4' lacks the number of processes a node. Write -j 2..4x1 for one process.",
    ),
    "no node and no processes": (
        ["run", "src/train.py", "-j", "0..3", "--backend", "gloo"],
        "-j '0..3' lacks the number of processes a node. Write -j 1..3x1 for one process.",
    ),
    "servers whose number is fixed, on nodes whose is not": (
        ["run", "src/train.py", "-j", "2..4x2", "--backend", "ps", "--ps", "1"],
        "-j 2..4 with --backend 'ps': there the numbers of workers and parameter servers are fixed.",
    ),
    "a misspelled backend": (
        ["run", "src/train.py", "-j", "2", "--backend", "ncll"],
        "--backend 'ncll' is unknown. Did you mean 'nccl'? Choose one of",
    ),
    "a GPU that is not there": (
        ["run", "src/train.py", "--gpu"],
        "--gpu with 1 worker, one GPU each, but target 'local' has no GPUs. Leave out --gpu, or choose another target.",
    ),
    "a name of no letters": (
        ["run", "src/train.py", "--name", ""],
        "--name '' is empty. Give a value, or leave --name out.",
    ),
    "torchrun's processes": (
        ["run", "--nproc_per_node", "2", "src/train.py"],
        "No such option: --nproc_per_node, which is torchrun's. Here: -j 2, or -j 2x2 for as many on each of two nodes.",
    ),
    "torchrun's nodes and processes": (
        ["submit", "--nnodes=3", "--nproc-per-node=4", "src/train.py"],
        "No such option: --nnodes, which is torchrun's. Here: -j 3x4.",
    ),
    "torchrun's range of nodes": (
        ["run", "--nnodes", "1:4", "--nproc-per-node", "2", "src/train.py"],
        "No such option: --nnodes, which is torchrun's. Here: -j 1..4x2.",
    ),
    "torchrun's range of nodes alone": (
        ["run", "--nnodes=1:4", "src/train.py"],
        "No such option: --nnodes, which is torchrun's. Here: -j 1..4xM.",
    ),
    "accelerate's file": (
        ["run", "--config_file", "a.yaml", "src/train.py"],
        "that file isn't read: give machines by -j",
    ),
    "a verb of a group": (["doctor"], "No such command 'doctor'. That is `paceline compute doctor TARGET`."),
    "mpirun's processes": (
        ["run", "-np", "4", "src/train.py"],
        "No such option: -np, which is mpirun's. Here: -j 4 --backend mpi.",
    ),
    "accelerate's processes": (["run", "--num_processes", "2", "src/train.py"], "which is accelerate's. Here: -j 2,"),
    "mpirun's hosts": (["run", "--hostfile", "h", "src/train.py"], "hosts belong to a compute target: paceline"),
    "another program's verb": (["ps"], "No such command 'ps'. That is `paceline list`. See `paceline --help`."),
    "a verb that is misspelled": (["statsu"], "No such command 'statsu'. Did you mean 'status' or 'stacks'?"),
    "another program's verb in a group": (["compute", "ls"], "No such command 'ls'. That is `list`."),
    "a file of variables that is not there": (["run", "src/train.py", "--env-file", "n.env"], "can't be read: No such"),
    "a file of variables that are none": (
        ["run", "src/train.py", "--env-file", "src/data.env"],
        "--env-file '{folder}/src/data.env', line 2: this is not NAME=VALUE.",
    ),
    "a job as YAML without a dry run": (["run", "src/train.py", "--yaml"], "--yaml belongs to --dry-run"),
    "a job file with an unknown key": (
        ["run", "src/job.yaml"],
        "'{folder}/src/job.yaml', line 2: unknown key 'node_cuont'. Did you mean node_count? Known are experiment, ",
    ),
    "a job file with an option's name": (
        ["run", "src/options.yaml"],
        "'{folder}/src/options.yaml', line 1: unknown key 'nodes'. Did you mean node_count? Known are ",
    ),
    "exec without a run": (
        ["exec", "--", "ls"],
        "Name a run and the command to run beside its worker: paceline exec RUN -- ",
    ),
    "-j of half": (["run", "src/train.py", "-j", "2x"], "-j '2x' is not NxM. Write 2x4 for two nodes of four"),
    "-j of nothing": (["run", "src/train.py", "-j", "0"], "-j '0' is not NxM."),
    "-j below nothing": (["run", "src/train.py", "-j", "-1"], "-j '-1' is not NxM."),
    "-j of words": (["run", "src/train.py", "-j", "two"], "-j 'two' is not NxM."),
    "several processes without a backend": (
        ["run", "src/train.py", "-j", "2"],
        "-j 2 makes 2 processes. Say how they find each other: --backend mpi, gloo, nccl or tensorflow.",
    ),
    "an unknown backend": (
        ["run", "src/train.py", "--backend", "smoke"],
        "--backend 'smoke' is unknown. Choose one of 'mpi', 'gloo'",
    ),
    "nccl without GPUs": (["run", "src/train.py", "--backend", "nccl"], "Add --gpu, or choose 'gloo'."),
    "an unknown target": (
        ["run", "src/train.py", "--compute", "moon"],
        "there is no compute target 'moon'. There are local.",
    ),
    "the script's argument without two dashes": (
        ["run", "src/train.py", "--epochs", "5"],
        "The script's own arguments go behind `--`: paceline run train.py -- --epochs 5. See `paceline run --help`.",
    ),
    "a variable without a value": (
        ["run", "src/train.py", "--env", "A"],
        "the value of a secret is missing; nothing was started. A: it is to be found at 'env:A', but the environment has no "
        "variable 'A'.",
    ),
    "a variable that the launcher sets": (
        ["run", "src/train.py", "--backend", "gloo", "--env", "RANK=1"],
        "--env sets RANK",
    ),
    "a variable of no such name": (["run", "src/train.py", "--env", "1 a=b"], "has the name '1 a'"),
    "a tag without a name": (["run", "src/train.py", "--tag", "=b"], "--tag '=b' is not KEY or KEY=VALUE."),
    "an experiment of no such name": (["run", "src/train.py", "-e", "../x"], "experiment name '../x'"),
    "a limit of nothing": (["run", "src/train.py", "--max-duration", "0"], "--max-duration 0.0 is not"),
    "a limit that is not a number": (
        ["run", "src/train.py", "--max-duration", "nan"],
        "Invalid value for '--max-duration': 'nan' is not a duration. Write a number of seconds (90), units (90s, 5m, 1h30m,",
    ),
    "a grace below nothing": (["run", "src/train.py", "--grace", "-1"], "'--grace': '-1' is not a duration. Write"),
    "a patience that is none": (
        ["compute", "list", "--timeout", "1e"],
        "Invalid value for '--timeout': '1e' is not a duration.",
    ),
    "restarts below nothing": (["run", "src/train.py", "--max-restarts", "-1"], "--max-restarts -1 is not"),
    "restarts on exceptions without restarts": (
        ["run", "src/train.py", "--restart-on-exception"],
        "--restart-on-exception without --max-restarts: say how often",
    ),
    "parameter servers without their backend": (
        ["run", "src/train.py", "--ps", "1"],
        "--ps 1 belongs to --backend ps.",
    ),
    "a script outside its source": (
        ["run", "src/train.py", "--source", "src/sub"],
        "'src/train.py' is outside of --source 'src/sub'. Name a folder that holds the script.",
    ),
    "a Python that is none": (["run", "src/train.py", "--python", "nopython"], "--python 'nopython' can't be run"),
    "two requirements files": (
        ["run", "src/train.py", "-r", "a.txt", "-r", "b.txt"],
        "--requirements was given 2 times (a.txt, b.txt). Give one file",
    ),
    "nothing to isolate": (["run", "src/train.py", "--isolated"], "--isolated without packages"),
    "a size without a container": (
        ["run", "src/train.py", "--shm-size", "2g"],
        "--shm-size '2g' without --image",
    ),
    "a channel without packages": (
        ["run", "src/train.py", "--channel", "c"],
        "--channel 'c' without --conda",
    ),
    "a password in an input's URL": (
        ["run", "src/train.py", "--input", "x=http://u:hunter2@example.org/p.png"],
        "the URL of the store 'http://***@example.org/p.png' would hold a secret",
    ),
    "a signature in an input's URL": (
        ["run", "src/train.py", "--dry-run", "--input", "x=https://example.org/p.png?sig=hunter2"],
        "would hold a secret in the clear",
    ),
    "an output that leaves its store": (
        ["run", "src/train.py", "--output", "o=default:../../res"],
        "'../../res'",
    ),
    "an upload of what is not there": (["data", "upload", "nope", "default:x"], "there is no 'nope' here."),
    "an unknown run": (["status", "nonesuch"], "no run 'nonesuch' in '{folder}/.paceline'. `paceline list` shows"),
    "a run id that leaves the workspace": (["show", "../../etc"], "run id '../../etc': an id is letters"),
    "the same for logs": (["logs", "../x"], "run id '../x': an id is letters"),
    "the same for cancel": (["cancel", "a/b"], "run id 'a/b': an id is letters"),
    "the same for rerun": (["rerun", ".."], "run id '..': an id is letters"),
    "an unknown state": (["list", "--status", "Sleeping"], "--status 'Sleeping' is not a state. There are NotStarted,"),
    "a list of nothing": (["list", "-n", "0"], "Invalid value for '-n' / '--limit'"),
    "an unknown verb": (["fly"], "No such command 'fly'. See `paceline --help`."),
    "an unknown option": (["status", "--fast"], "No such option: --fast. See `paceline status --help`."),
    "an option that is misspelled": (
        ["logs", "--folow"],
        "No such option: --folow. Did you mean --follow? See `paceline logs --help`.",
    ),
    "an option of the script's": (
        ["run", "src/train.py", "--zz", "1"],
        "No such option: --zz. The script's own arguments go behind `--`: paceline run train.py -- --epochs 5. "
        "See `paceline run --help`.",
    ),
    "an argument too many": (
        ["trust", "a", "b"],
        "Got unexpected extra argument (b). See `paceline trust --help`.",
    ),
    "an option without its value": (
        ["run", "src/train.py", "--pip"],
        "Option '--pip' requires an argument. See `paceline run --help`.",
    ),
    "an option of a group's verb without its value": (
        ["sweep", "run", "src/train.py", "--param"],
        "Option '--param' requires an argument. See `paceline sweep run --help`.",
    ),
    "a rerun of nothing": (["rerun"], "Missing argument 'RUN'. See `paceline rerun --help`."),
}


#: Calls that violate a rule of an estimator, a sweep, an environment or a service. Their parameters have other names in Python.
REFUSED_BY_A_PARAMETER = """
run t.py --gpu-visibility nod
run t.py --gpu-share 2 --gpu
run t.py --on-hang restrat
run t.py --on-failure replase
run t.py --on-failure replace
run t.py --on-failure replace --max-restarts 1 -j 1x2 --backend mpi
run t.py --on-failure replace --max-restarts 1 -j 1..2x2 --backend gloo
run t.py --on-failure replace --max-restarts 1 -j 1x1 --backend gloo
run t.py --on-failure replace --max-restarts 1 -j 1x2 --backend gloo --gpu
run t.py --on-failure replace --max-restarts 1 -j 1x2 --backend gloo --image x
run t.py --cores -1
run t.py -j 1x2 --backend nccl --gpu
run t.py --image x --conda numpy
run t.py --pip '-r x'
run t.py --conda numpy --conda-file x.yml
run t.py --conda-file x.yml
run t.py -r none.txt
run t.py --channel c
run t.py --python none
run t.py --env 1A=3
run t.py --env PACELINE_RUN_ID=1
run t.py --notify x
run t.py --notify mail:a@b.c --notify-on x
run t.py --notify-on end
run t.py --input 'a b=/tmp'
run t.py --input a=/tmp --input a=/tmp
run t.py --input a=/tmp,partition=ran
run -m a-b
submit t.py --backend ncll
check t.py --backend ncll
sweep run t.py --dry-run --param a=1 --metric m --backend ncll
sweep run t.py --dry-run --param a=1 --metric m --trials 0
sweep run t.py --dry-run --param a=1 --metric m --max-failures -1
sweep run t.py --dry-run --param a=1 --metric m --max-sweep-duration 0
sweep run t.py --dry-run --param a=1 --metric m --pass-as equal
sweep run t.py --dry-run --param a=1 --metric m --array-size 0
sweep run t.py --dry-run --param a=1 --metric m --controller slrum
sweep run t.py --dry-run --param a=1 --metric m --sampler rnadom
env build --channel x
env build --conda-file none
env build -r none
serve t.py --entry t.py --log-level wraning
serve t.py --entry t.py --max-batch 0
serve t.py --entry t.py --python none
service deploy name -m t.py --entry none.py
service deploy name -m t.py --entry t.py --source none
service deploy name -m t.py --entry t.py --port 99999
service deploy name -m t.py --entry t.py --workers 0
service deploy name -m t.py --entry t.py --channel x
package ./t.py -o out --entry t.py --workers 0
profile --rate 0
"""


@pytest.mark.promise("errors-command-line-speak-options")
@pytest.mark.parametrize("line", REFUSED_BY_A_PARAMETER.strip().splitlines())
def test_command_line_errors_mention_options_and_no_python_parameters(in_process: InProcess, line: str) -> None:
    message = in_process(*shlex.split(line))
    names = "concurrent|controller|cores|host|notify|port|python|rate|sampler|seconds|trials|workers"
    assert re.findall(rf"\b[a-z]+_[a-z_]+\b|\b(?:{names})=|\b(?:True|False|None)\b|\['", message) == []


@pytest.mark.promise("errors-command-line-speak-options")
@pytest.mark.parametrize(
    ("line", "meant"),
    {
        "run t.py --backend ncll": "nccl",
        "run t.py --gpu-visibility wroker": "worker",
        "run t.py --on-hang fial": "fail",
        "run t.py --on-failure replase": "replace",
        "run t.py --notify mail:a@b.c --notify-on faliure": "failure",
        "run t.py --input a=/tmp,partition=ran": "rank",
        "sweep run t.py --dry-run --param 'a=unifrom(0,1)' --metric m": "uniform",
        "sweep run t.py --dry-run --param a=1 --metric m --sampler gird": "grid",
        "sweep run t.py --dry-run --param a=1 --metric m --stop hyperban": "hyperband",
        "sweep run t.py --dry-run --param a=1 --metric m --pass-as equal": "equals",
        "sweep run t.py --dry-run --param a=1 --metric m --controller slrum": "slurm",
        "serve t.py --entry t.py --log-level wraning": "warning",
        "export --to parqet": "parquet",
        "usage --by usr": "user",
        "list --status runing": "Running",
        "prune --status Faild": "Failed",
    }.items(),
)
def test_misspelled_choice_suggests_the_nearest(in_process: InProcess, line: str, meant: str) -> None:
    assert f"Did you mean {meant!r}?" in in_process(*shlex.split(line))


def text_options() -> list[tuple[str, ...]]:
    """Return each option that takes a text, together with the words of its verb."""
    found: list[tuple[str, ...]] = []
    for name in VERBS:
        verb = app.load(name)
        below = verb.commands if isinstance(verb, VerbGroup) else {"": verb}
        for word, command in below.items():
            options = command.options if isinstance(command, VerbCommand) else ()
            found += [
                (*filter(None, (name, word)), option.long_word)
                for option in options
                if not option.is_argument and option.type in (str, list, Path) and not option.may_be_empty
            ]
    return found


@pytest.mark.promise("errors-command-line-speak-options")
def test_blank_option_value_is_refused_by_every_command(in_process: InProcess) -> None:
    options = text_options()
    assert len(options) > 100
    for *verb, option in options:
        needed = {"compute add": ["x", "--kind", "ssh"], "export": [], "package": ["x", "-o", "y"]}.get(
            " ".join(verb), ["x", "y"]
        )
        message = in_process(*verb, *needed, option, " ")
        assert re.search(r"is empty\. Give a value|unexpected extra argument|No such option", message), (
            verb,
            option,
            message,
        )


@pytest.mark.promise("exit-codes-table-124-time")
@pytest.mark.parametrize("case", WRONG)
def test_invalid_command_line_is_refused_with_one_error_line(cli: Cli, case: str) -> None:
    words, message = WRONG[case]
    cli.script("")
    cli.script("", "src/sub/a.py")
    cli.script("", "src/data.txt")
    cli.script("#!/bin/sh", "src/run.sh")
    cli.script("A=1\nhunter 2\n", "src/data.env")
    cli.script("entry_script: train.py\nnode_cuont: 2\n", "src/job.yaml")
    cli.script("nodes: 2\n", "src/options.yaml")
    done = cli(*words, code=2)

    assert done.stdout == ""
    assert done.stderr.startswith("paceline: error: ")
    assert message.format(folder=cli.folder) in " ".join(done.stderr.split())
    # The error is one line long, and no run was started.
    assert len(done.stderr.splitlines()) == 1
    assert cli.run_ids() == []


@pytest.mark.parametrize("verb", ["logs", "metrics"])
def test_logs_and_metrics_refuse_a_rank_that_the_run_does_not_have(gallery: Gallery, verb: str) -> None:
    done = gallery(verb, gallery.bad, "--rank", "2", code=2)
    has = f"run {gallery.bad} has ranks 0 to 1. Leave --rank out to see all."
    assert done.stderr == f"paceline: error: --rank 2: {has}\n"
    assert "'x' is not a valid integer." in gallery(verb, gallery.bad, "--rank", "x", code=2).stderr


def test_ambiguous_run_id_prefix_is_refused(cli: Cli) -> None:
    first, second = cli.submit("", "-e", "same"), cli.submit("", "-e", "same")
    cli.wait(first)
    cli.wait(second)
    done = cli("status", "same", code=2)

    assert done.stderr == f"paceline: error: 2 runs begin with 'same': {second}, {first}. Give more of the id.\n"


def test_workspace_in_an_uncreatable_folder_is_refused(cli: Cli) -> None:
    (cli.folder / "file").write_text("")
    done = cli("list", env={"PACELINE_WORKSPACE": "file/ws"}, code=2)

    assert "can't be made: Not a directory. Name another folder with PACELINE_WORKSPACE" in done.stderr


def test_call_without_a_command_shows_the_help(cli: Cli) -> None:
    done = cli(code=2)

    assert done.stdout.startswith("Usage: paceline [OPTIONS] COMMAND [ARGS]...")


@pytest.mark.parametrize("verb", ["", "run", "submit", "rerun", "status", "list", "show", "logs", "cancel"])
def test_help_of_each_command_fits_80_columns(cli: Cli, verb: str) -> None:
    text = cli(*verb.split(), "--help").stdout

    assert text.startswith(f"Usage: paceline {verb}".rstrip())
    # The text is wrapped, although the output is not a terminal.
    assert "--help" in text
    assert max(map(len, text.splitlines())) <= 80
    if not verb:
        assert cli("-h").stdout == text
        for name in ("run", "submit", "rerun", "status", "list", "show", "logs", "cancel"):
            assert f"\n  {name} " in text


def test_version_option_prints_the_package_version(cli: Cli) -> None:
    import paceline

    assert cli("--version").stdout == f"paceline {paceline.__version__}\n"


@pytest.mark.promise("exit-codes-table-124-time")
def test_run_on_an_unreachable_ray_cluster_exits_with_69_and_one_error_line(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no process listens on this port
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        cli("compute", "add", "far", "--kind", "ray", "--address", address, "--no-check")
        done = cli("run", "--compute", "far", cli.script(""), code=69)

    assert f"the Ray cluster at {address} does not answer: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_listing_an_unreachable_datastore_exits_with_69_and_one_error_line(cli: Cli) -> None:
    pytest.importorskip("aiohttp")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no process listens on this port
        cli("data", "add", "far", f"http://127.0.0.1:{taken.getsockname()[1]}")
        done = cli("data", "ls", "far", code=69)

    assert "listing '' in datastore 'far' (http://127.0.0.1:" in done.stderr
    assert "Try again" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 1), (errno.ENOSPC, 1), (errno.EBADF, 70)])
def test_full_or_read_only_disk_is_no_bug_of_paceline(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`schedule add`, `schedule pause`, `account add` and `account remove` reported their read-only folder as a bug."""

    def fail() -> None:
        raise OSError(number, os.strerror(number), "/ws/ui/accounts")

    main = importlib.import_module("paceline.cli.main")
    monkeypatch.setattr(main, "_log_to_standard_error", lambda: None)
    monkeypatch.setattr("paceline.cli.parser.call", fail)
    assert main._exit_code() == code
    wanted = {1: f"'/ws/ui/accounts' can't be used: {os.strerror(number)}. Change that", 70: "Paceline has a bug"}
    assert wanted[code] in capsys.readouterr().err
