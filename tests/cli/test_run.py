"""run, submit and rerun: what they start, where they print, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path

import pytest

import paceline as pl
from paceline.cli.dry_run import print_plan
from paceline.job.job import Job
from paceline.job_files.description import Asked
from paceline.targets import local
from tests.cli.conftest import Cli
from tests.cli.test_read import SUMMARY_KEYS
from tests.engines.conftest import require_engine
from tests.engines.lab import SYSTEM, WHEEL, find_mpirun
from tests.helpers import make_job, wait_until


@pytest.mark.promise("standard-output-script-s-output")
def test_run_prints_the_scripts_output_and_nothing_else_on_standard_output(cli: Cli) -> None:
    done = cli("run", cli.script("import sys\nprint('out')\nprint('err', file=sys.stderr)\n"))

    assert done.stdout == "out\nerr\n"
    (run_id,) = cli.run_ids()
    lines = done.stderr.splitlines()
    name = cli.json("status", run_id)["display_name"]
    assert re.fullmatch(r"[a-z]+-[a-z]+-\d+", name)
    assert lines[0] == f"Run {name} ({run_id}): src/train.py on local, 1 process"
    assert lines[-1].startswith("Completed in ")


def test_first_line_printed_by_the_run_command_shows_the_given_run_name(cli: Cli) -> None:
    done = cli("run", "--name", "warm\x1b start", cli.script(""))

    (run_id,) = cli.run_ids()
    assert done.stderr.splitlines()[0] == f"Run warm\\x1b start ({run_id}): src/train.py on local, 1 process"


def test_run_puts_the_rank_in_front_of_each_line(cli: Cli) -> None:
    done = cli("run", cli.script("print('out')\n"), "-j", "2x1", "--backend", "gloo")

    assert sorted(done.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert done.stderr.splitlines()[0].endswith("src/train.py on local, 2 nodes x 1 process, gloo")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("import os; os._exit(200)", 200),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_run_command_exits_with_the_exit_code_of_its_script(cli: Cli, script: str, code: int) -> None:
    cli("run", cli.script("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n" + script), code=code)


@pytest.mark.promise("exit-codes-table-124-time")
def test_run_exits_with_124_after_the_time_limit(cli: Cli) -> None:
    done = cli("run", "--max-duration", "0.5", cli.script("import time; time.sleep(600)"), code=124)

    assert "The run took longer than max_run_duration_seconds=0.5 and was ended." in done.stderr


@pytest.mark.promise("exit-codes-table-124-time")
def test_run_exits_with_143_when_another_terminal_cancels_it(cli: Cli) -> None:
    following = cli.start("run", cli.script("import time; print('there', flush=True); time.sleep(600)"))
    assert following.stdout is not None
    assert following.stdout.readline() == "there\n"
    (run_id,) = cli.run_ids()
    cli("cancel", run_id)

    _, errors = following.communicate(timeout=180)
    assert following.returncode == 143
    assert errors.splitlines()[-1].startswith("Canceled in ")


def test_run_prints_the_failure_report_at_its_end(cli: Cli) -> None:
    script = cli.script(
        """
        import os, time
        if os.environ["PACELINE_RANK"] == "1":
            raise ValueError("bad batch")
        time.sleep(600)
        """
    )
    done = cli("run", script, "-j", "2", "--backend", "gloo", code=1)

    (run_id,) = cli.run_ids()
    report = done.stderr.partition("\n\n")[2]
    assert report.splitlines()[0] == "Rank 1 on node local failed first: ValueError: bad batch"
    assert "    ValueError: bad batch\n" in report
    assert "rank 0 was ended by Paceline because of it.\n" in report
    assert f"More: paceline logs {run_id} --rank 1\n" in report


def test_arguments_after_two_dashes_go_to_the_script(cli: Cli) -> None:
    script = cli.script("import json, sys; print(json.dumps(sys.argv))")
    words = ["--epochs", "5", "--", "-j", "2", "two words", "", "-q", "ünï\n☃"]
    done = cli("run", script, "-q", "--", *words)

    assert json.loads(done.stdout) == ["src/train.py", *words]
    assert json.loads(cli("run", script, "-q", "plain", "words").stdout) == ["src/train.py", "plain", "words"]


@pytest.mark.promise("command-behind-runs-current-folder")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["bash", "-c", "echo $PACELINE_RANK of $#", "name", "a b"], "0 of 1"),
        # Paceline passes a single word with a space to the shell as a command line.
        (["cd src && ls"], "go.sh"),
        # The path names a program of the machine. Its folder is not copied.
        (["/bin/echo", "a b"], "a b"),
        # The program runs in the current folder, not in the folder of the program.
        (["./src/go.sh", "c"], "c beside"),
    ],
    ids=["program", "line", "path", "file"],
)
def test_command_behind_two_dashes_runs_in_a_copy_of_the_working_directory(
    cli: Cli, words: list[str], shown: str
) -> None:
    (cli.folder / "src").mkdir()
    (cli.folder / "src/go.sh").write_text('#!/bin/sh\necho "$1" $(ls | grep beside)\n')
    (cli.folder / "src/go.sh").chmod(0o755)
    (cli.folder / "beside").write_text("")
    assert cli("run", "-q", "--", *words).stdout == f"{shown}\n"


def test_quiet_leaves_only_the_scripts_output_and_errors(cli: Cli) -> None:
    done = cli("run", "-q", cli.script("print('out')\n"))
    assert (done.stdout, done.stderr) == ("out\n", "")

    done = cli("run", "-q", cli.script("raise ValueError('bad batch')\n"), code=1)
    assert "Run " not in done.stderr
    assert "ValueError: bad batch" in done.stderr


def test_run_command_prints_output_files_and_files_left_in_the_working_folder(cli: Cli) -> None:
    script = cli.script("for n in range(7): open(f'outputs/{n}', 'w')\nopen('beside', 'w')\n")
    done = cli("run", script)

    (run_id,) = cli.run_ids()
    folder = cli.run_folder(run_id)
    names = ", ".join(f"outputs/{n}" for n in range(5))
    assert f"Outputs in {folder / 'outputs'}: {names} and 2 more\n" in done.stderr
    assert f"The script also left in {folder / 'work'}: beside\n" in done.stderr


def test_run_reports_pipes_and_outward_symlinks_among_its_outputs_as_left_out(cli: Cli) -> None:
    script = cli.script("import os\nos.symlink('/etc', 'outputs/etc')\nos.mkfifo('outputs/p\\x1b[2Jipe')\n")
    done = cli("run", script)

    assert "Completed" in done.stderr
    assert "Outputs in" not in done.stderr
    told = ["'outputs/etc' is a link that leads out of the run, to '/etc'", "'outputs/p\\x1b[2Jipe' is a pipe"]
    for shown in (done.stderr, cli("status").stdout):
        assert all(f"Left out: {text}\n" in shown for text in told)
    assert all(text in cli("show").stdout for text in told)
    found = cli.json("show")
    assert ([one["name"] for one in found["left_out"]], found["left_out_count"], found["files"]) == (
        ["outputs/etc", "outputs/p\x1b[2Jipe"],
        2,
        ["logs/driver.log", "logs/rank_0.log"],
    )


def test_run_with_json_prints_json_alone_on_standard_output(cli: Cli) -> None:
    done = cli("run", "--json", cli.script("print('out')\nraise SystemExit(3)\n"), code=3)
    found = json.loads(done.stdout)

    assert list(found) == SUMMARY_KEYS
    assert (found["status"], found["exit_code"], found["failure"]["cause"]) == ("Failed", 3, "exception")
    assert "out\n" in done.stderr


def test_submit_prints_the_run_id_and_the_logs_status_and_cancel_commands_without_waiting(cli: Cli) -> None:
    done = cli("submit", cli.script("import time; time.sleep(600)"))

    (run_id,) = cli.run_ids()
    assert done.stdout == f"{run_id}\n"
    for command in (f"paceline logs -f {run_id}", f"paceline status {run_id}", f"paceline cancel {run_id}"):
        assert command in done.stderr
    assert cli.wait(run_id, "Running") == "Running"
    cli("cancel", "--wait", run_id)
    assert cli.wait(run_id) == "Canceled"
    assert cli("submit", "-q", cli.script("")).stderr == ""


def test_submit_with_json_has_the_id_and_the_state(cli: Cli) -> None:
    found = cli.json("submit", cli.script(""))

    assert list(found) == SUMMARY_KEYS
    assert [found["run_id"]] == cli.run_ids()
    assert found["status"] in ("NotStarted", "Queued", "Preparing", "Starting", "Running", "Completed")
    assert cli.wait(found["run_id"]) == "Completed"


def test_run_command_applies_its_options_env_tag_experiment_and_source(cli: Cli) -> None:
    script = cli.script(
        "import os, pathlib; print(os.environ['A'], os.environ['B'], os.getcwd(), pathlib.Path('data').exists())"
    )
    (cli.folder / "data").write_text("x")
    words = ["--env", "A=1", "--env", "B=x=y z", "--tag", "k=v=w", "--tag", "bare", "-e", "named", "--source", "."]
    done = cli("run", script, *words)

    (run_id,) = cli.run_ids()
    assert done.stdout == f"1 x=y z {cli.run_folder(run_id) / 'work'}{cli.folder} True\n"
    assert run_id.startswith("named_")
    found = cli.json("show", run_id)
    assert (found["tags"], found["job"]["entry_script"]) == ({"k": "v=w", "bare": None}, "src/train.py")
    assert found["source_directory"] == str(cli.folder)


@pytest.mark.parametrize(
    ("folder", "experiment"), [("digits", "digits"), ("my digits; 2", "my-digits-2"), ("ünï-", "n"), ("☃", "default")]
)
def test_default_experiment_is_named_after_the_folder_of_the_script(cli: Cli, folder: str, experiment: str) -> None:
    script = cli.folder / cli.script("", f"{folder}/train.py")
    run_id = cli(
        "submit", script.name, cwd=script.parent, env={"PACELINE_WORKSPACE": str(cli.folder / ".paceline")}
    ).stdout
    assert run_id.rsplit("_", 2)[0] == experiment
    cli.wait(run_id.strip())


def test_parameter_servers_are_labeled_in_run_and_logs(cli: Cli) -> None:
    # The workers wait for a message of the parameter server, because Paceline ends the parameter server as soon as all
    # workers have finished.
    script = cli.script(
        """
        import json, os, time
        role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
        print(role, flush=True)
        if role == "ps":
            open("outputs/ps", "w").close()
            time.sleep(600)
        while not os.path.exists("outputs/ps"):
            time.sleep(0.01)
        """
    )
    done = cli("run", script, "-j", "3", "--backend", "ps", "--ps", "1")

    assert "2 workers, 1 parameter servers, ps" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] worker", "[rank 1] worker", "[rank 2] ps"]


@pytest.mark.promise("dry-run-shows-would-start")
@pytest.mark.parametrize(
    ("verb", "nodes", "backend", "size"), [("run", "1", None, 1), ("submit", "2x2", "gloo", 4), ("run", "2", "mpi", 2)]
)
def test_dry_run_prints_the_plan_and_starts_nothing(
    cli: Cli, verb: str, nodes: str, backend: str | None, size: int
) -> None:
    if backend == "mpi":
        require_engine("Open MPI", find_mpirun(WHEEL) or find_mpirun(SYSTEM))
    words = ["--dry-run", "--env", "A=b c", "-j", nodes, *(["--backend", backend] if backend else [])]
    script = cli.script("open('started', 'w')")
    text = cli(verb, script, *words, "--", "--epochs", "5").stdout
    found = json.loads(cli(verb, script, *words, "--json", "--", "--epochs", "5").stdout)

    assert "Nothing was started." in text
    assert "A='b c'" in text
    assert "entry_script: 'src/train.py'" in text
    assert list(found) == ["job", "source_directory", "not_copied", "commands"]
    assert found["job"]["arguments"] == ["--epochs", "5"]
    assert all(list(command) == ["node_rank", "ranks", "argv", "environment"] for command in found["commands"])
    assert [rank for command in found["commands"] for rank in command["ranks"]] == list(range(size))
    assert f"for rank {', '.join(map(str, found['commands'][0]['ranks']))}:" in text
    assert all(command["environment"]["A"] == "b c" for command in found["commands"])
    assert cli.run_ids() == []
    assert not list(cli.folder.rglob("started"))


def test_paths_of_the_send_option_are_relative_to_the_working_directory(cli: Cli) -> None:
    cli.script("print()", "code/src/train.py")
    for name in ("code/data/x.txt", "code/.git/HEAD", "other/y.txt"):
        cli.script("", name)
    (cli.folder / "code/away").symlink_to(cli.folder / "other")
    here = cli.folder / "code/src"
    sends = ["--send", "../data", "--send", cli.folder / "code/away", "--send", "../data/x.txt"]
    found = json.loads(cli("run", "--dry-run", "--json", *sends, "train.py", cwd=here).stdout)
    assert found["job"]["send"] == ["data", "away", "data/x.txt"]
    (cli.folder / "job.yaml").write_text(cli("run", "--dry-run", "--yaml", *sends, "train.py", cwd=here).stdout)
    assert json.loads(cli("run", "--dry-run", "--json", "job.yaml").stdout)["job"]["send"] == found["job"]["send"]
    other, top = cli.folder / "other", cli.folder / "code"
    outside = (
        f"--send '{other}' lies outside '{top}', the folder that is copied. Send it as an input: --input NAME={other}"
    )
    for path, said in {
        "../nothing": f"--send 'nothing': '{top}' has no such file or folder. Give an existing path.",
        "../../other": outside,
        "..": "--send '.' is the whole source folder, whose code is sent anyway.",
        "../.git": "--send '.git' can't be sent to other machines: a program's own.",
    }.items():
        assert said in cli("run", "--send", path, "train.py", cwd=here, code=2).stderr
    assert cli.run_ids() == []


def test_run_prints_why_a_failed_attempt_ended_and_logs_with_attempt_shows_the_log_of_that_attempt(cli: Cli) -> None:
    script = cli.script(
        """
        import os
        print("attempt", os.environ["PACELINE_ATTEMPT"])
        if os.environ["PACELINE_ATTEMPT"] == "1":
            raise ValueError("wrong")
        """
    )
    done = cli("run", "--max-restarts", "1", "--restart-on-exception", script)
    (run_id,) = cli.run_ids()

    assert "Attempt 1 ended (exception); attempt 2 starts.\n" in done.stderr
    first, second = (line for line in cli("show", run_id).stdout.splitlines() if line.endswith("on local"))
    started = [attempt["started_utc"] for attempt in cli.json("show", run_id)["attempt_records"]]
    assert re.fullmatch(rf"Attempts:    1  {started[0]}  exception after [\d.]+ s  on local", first)
    assert re.fullmatch(rf"             2  {started[1]}  completed after [\d.]+ s  on local", second)
    assert cli("logs", run_id, "--attempt", "1").stdout.startswith("attempt 1\nTraceback (most recent call last)")
    assert cli("logs", run_id, "--attempt", "2").stdout == "attempt 2\n"
    assert cli("logs", run_id, "--attempt", "3", code=2).stderr.endswith(f"run {run_id} has 2 so far.\n")


def test_dry_run_prints_the_batch_script_of_a_compute_target_that_submits_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Define a new class, because isinstance caches a protocol's result for a class, even if its methods are removed.
    class LocalQueue(local.ThisMachine):
        def script(self, job: Job) -> str:
            return f"#!/bin/sh\nrun {job.entry_script}\n"

        look = cancel = channel = lambda self, *given: None

    monkeypatch.setattr(local, "ThisMachine", LocalQueue)
    (tmp_path / "train.py").touch()
    asked = Asked(job=make_job(), directory=tmp_path, experiment="e", tags={})
    print_plan(asked, as_json=False)
    assert "\nGiven to local:\n\n#!/bin/sh\nrun train.py\n\nOn node 0," in capsys.readouterr().out
    print_plan(asked, as_json=True)
    assert json.loads(capsys.readouterr().out)["script"] == "#!/bin/sh\nrun train.py\n"


@pytest.mark.promise("paceline-rerun-submits-same-snapshot")
def test_rerun_uses_the_snapshot_of_the_run(cli: Cli) -> None:
    script = cli.script("import sys; print('old', sys.argv[1:])\n")
    cli("run", script, "--", "--epochs", "5")
    (first,) = cli.run_ids()
    cli.script("print('new')\n")
    done = cli("rerun", first)

    assert done.stdout == "old ['--epochs', '5']\n"
    (second,) = set(cli.run_ids()) - {first}
    assert cli.json("status", second)["tags"] == {"rerun_of": first}


def test_rerun_with_set_and_unset_changes_the_arguments_passed_to_the_script(cli: Cli) -> None:
    source = """
        import argparse, sys
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.add_argument("--amp", action="store_true")
        parser.parse_args()
        print(sys.argv[1:])
    """
    cli("run", cli.script(textwrap.dedent(source)), "--", "--lr", "0.1")
    (first,) = cli.run_ids()
    assert cli("rerun", first, "--set", "lr=0.5", "--set", "amp=true").stdout == "['--lr', '0.5', '--amp']\n"
    assert cli("rerun", first, "--unset", "lr", "-j", "2", "--backend", "gloo").stdout.count("[]") == 2
    for wrong, said in (
        (("--set", "rate=1"), "rate: the script has no option --rate"),
        (("--set", "lr=fast"), "lr: fast must be of type float"),
        (("--set", "lr"), "--set takes NAME=VALUE"),
        (("--compute", "moon"), "--compute: there is no compute target 'moon'"),
        (("-j", "2"), "so that the processes can find each other"),
        (("--resume",), "the run has no checkpoint to start from"),
    ):
        assert said in cli("rerun", first, *wrong, code=2).stderr
    assert len(cli.run_ids()) == 3


def test_rerun_exits_with_the_scripts_code_and_with_detach_prints_the_new_run_id(cli: Cli) -> None:
    cli("run", cli.script("import sys; sys.exit(3)"), code=3)
    (first,) = cli.run_ids()
    cli("rerun", first, code=3)
    again = cli("rerun", "-d", first).stdout.strip()

    assert cli.wait(again) == "Failed"
    assert again != first


def test_rerun_without_a_snapshot_is_refused(cli: Cli) -> None:
    run_id = cli.submit("")
    cli.wait(run_id)
    for snapshot in (cli.folder / ".paceline" / "snapshots").iterdir():
        snapshot.rename(cli.folder / snapshot.name)
    assert "Submit the source again." in cli("rerun", run_id, code=2).stderr

    own = pl.Experiment(pl.Workspace(cli.folder / ".paceline"), "own").start_logging()
    own.complete()
    assert "was not submitted but logged by a program" in cli("rerun", own.id, code=1).stderr


def test_queued_run_reports_the_run_it_waits_for(cli: Cli) -> None:
    cores = len(os.sched_getaffinity(0))
    holder = cli.submit("import time; time.sleep(600)", "-j", str(cores), "--backend", "gloo")
    assert cli.wait(holder, "Running") == "Running"
    waiting = cli.start("run", cli.script("print('my turn')"))
    wait_until(lambda: len(cli.run_ids()) == 2, "the second run is there")
    (second,) = set(cli.run_ids()) - {holder}
    wait_until(lambda: "waits for" in (cli.run_folder(second) / "state.json").read_text(), "the second run waits")
    assert cli("status", second).stdout.partition(")  ")[2] == f"Queued\nwaits for 1 run ({holder})\n"
    cli("cancel", holder)

    out, errors = waiting.communicate(timeout=180)
    assert waiting.returncode == 0
    assert out == "my turn\n"
    assert f"Queued: waits for 1 run ({holder})\n" in errors
