"""logs: what the workers print, from the start, followed live, of all or of one, whole or by a pipe that is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.cli.conftest import Cli, Gallery


def test_logs_of_all_ranks_have_the_rank_in_front(gallery: Gallery) -> None:
    lines = gallery("logs", gallery.bad).stdout.splitlines()

    assert sorted(line for line in lines if line.endswith("hello")) == ["[rank 0] hello", "[rank 1] hello"]
    assert lines[-1] == "[rank 1] ValueError: bad batch"


def test_a_progress_bar_is_one_readable_line_in_a_pipe(gallery: Gallery) -> None:
    text = gallery("logs", gallery.good).stdout

    assert text == "progress 100%\ndone\n\ufffd\n"


def test_logs_of_one_rank_are_what_it_wrote_to_the_byte(gallery: Gallery) -> None:
    done = subprocess.run(
        gallery.argv("logs", gallery.good, "--rank", "0"),
        env=gallery.environment,
        cwd=gallery.folder,
        capture_output=True,
        check=True,
    )

    bar = "".join(f"\rprogress {percent}%" for percent in range(0, 101, 20))
    assert done.stdout == bar.encode() + b"\ndone\n\xff\n"


def test_logs_as_json_is_one_object_a_line(gallery: Gallery) -> None:
    lines = [json.loads(line) for line in gallery("logs", gallery.bad, "--json").stdout.splitlines()]

    assert all(list(line) == ["attempt", "rank", "text"] for line in lines)
    hello = sorted((line["rank"], line["attempt"]) for line in lines if line["text"] == "hello")
    assert hello == [(0, 1), (1, 1)]
    only = [json.loads(line) for line in gallery("logs", gallery.bad, "--json", "--rank", "1").stdout.splitlines()]
    assert only == [line for line in lines if line["rank"] == 1]


def test_logs_of_the_driver_are_the_supervisors_words(gallery: Gallery) -> None:
    assert "failed first: ValueError: bad batch" in gallery("logs", gallery.bad, "--driver").stdout


def test_logs_f_follows_from_the_start_across_attempts_in_another_terminal(cli: Cli) -> None:
    run_id = cli.submit(
        """
        import os, signal, time
        attempt = os.environ["PACELINE_ATTEMPT"]
        print("attempt", attempt, flush=True)
        def wait(name):
            while not os.path.exists(os.path.join("outputs", name)):
                time.sleep(0.01)
        wait("go" + attempt)
        print("went on", attempt, flush=True)
        if attempt == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        "--max-restarts",
        "1",
    )
    cli.wait(run_id, "Running")
    early = cli.start("logs", "-f", run_id)
    outputs = cli.run_folder(run_id) / "outputs"
    assert early.stdout is not None
    assert early.stdout.readline() == "attempt 1\n"
    (outputs / "go1").touch()
    assert early.stdout.readline() == "went on 1\n"
    assert early.stdout.readline() == "attempt 2\n"
    # One that comes late sees the same.
    late = cli.start("logs", "-f", run_id)
    (outputs / "go2").touch()

    assert early.communicate(timeout=180) == ("went on 2\n", "")
    assert late.communicate(timeout=180) == ("attempt 1\nwent on 1\nattempt 2\nwent on 2\n", "")
    assert (early.returncode, late.returncode) == (0, 0)
    assert cli("logs", run_id, "--attempt", "1").stdout == "attempt 1\nwent on 1\n"
    assert cli("logs", run_id, "--rank", "0").stdout == "attempt 1\nwent on 1\nattempt 2\nwent on 2\n"
    assert "has 2 so far" in cli("logs", run_id, "--attempt", "3", code=2).stderr


def test_logs_f_of_one_rank(cli: Cli) -> None:
    run_id = cli.submit("import os; print('rank', os.environ['RANK'])\n", "-j", "2", "--backend", "gloo")

    assert cli("logs", "-f", "--rank", "1", run_id).stdout == "rank 1\n"


def test_logs_f_of_a_run_that_has_ended_ends(gallery: Gallery) -> None:
    assert gallery("logs", "-f", gallery.bad).stdout == gallery("logs", gallery.bad).stdout


def test_a_progress_bar_that_goes_on_is_shown_now_and_then(cli: Cli) -> None:
    # As tqdm draws: no newline until the end.
    run_id = cli.submit(
        """
        import os, sys, time
        step = 0
        while not os.path.exists("outputs/enough"):
            step += 1
            sys.stderr.write(f"\\r{step} steps")
            time.sleep(0.01)
        sys.stderr.write("\\r\\nend\\n")
        """
    )
    following = cli.start("logs", "-f", run_id)
    assert following.stdout is not None
    first = following.stdout.readline()
    second = following.stdout.readline()
    (cli.run_folder(run_id) / "outputs" / "enough").touch()
    rest, errors = following.communicate(timeout=180)

    steps = [int(line.removesuffix(" steps\n")) for line in (first, second)]
    # Not every one of them, and each but once.
    assert steps[0] < steps[1]
    assert steps[1] - steps[0] > 10
    assert rest.splitlines()[-1] == "end"
    assert len(rest.splitlines()) < 10
    assert errors == ""


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_a_reader_that_goes_away_is_no_error(cli: Cli, follow: list[str]) -> None:
    run_id = cli.submit("for n in range(20_000): print('line', n)\n")
    cli.wait(run_id)
    reader = cli.start("logs", *follow, run_id)
    assert reader.stdout is not None
    assert reader.stderr is not None
    assert reader.stdout.readline() == "line 0\n"
    reader.stdout.close()

    assert reader.stderr.read() == ""
    assert reader.wait(timeout=180) in (-signal.SIGPIPE, 128 + signal.SIGPIPE)
    reader.stderr.close()


def test_a_reader_of_run_that_goes_away_ends_neither_the_run_nor_in_a_traceback(cli: Cli) -> None:
    reader = cli.start("run", cli.script("for n in range(20_000): print('line', n)\n"))
    assert reader.stdout is not None
    assert reader.stderr is not None
    assert reader.stdout.readline() == "line 0\n"
    reader.stdout.close()

    errors = reader.stderr.read()
    assert reader.wait(timeout=180) in (-signal.SIGPIPE, 128 + signal.SIGPIPE)
    reader.stderr.close()
    assert "Traceback" not in errors
    (run_id,) = cli.run_ids()
    assert cli.wait(run_id) == "Completed"


def test_following_a_run_whose_supervisor_is_killed_ends(cli: Cli) -> None:
    run_id = cli.submit("import time; print('there', flush=True); time.sleep(600)")
    following = cli.start("logs", "-f", run_id)
    assert following.stdout is not None
    assert following.stdout.readline() == "there\n"
    record = json.loads((cli.run_folder(run_id) / "run.json").read_text())
    os.kill(record["owner"]["pid"], 9)

    following.communicate(timeout=180)
    assert following.returncode == 0
    assert cli.json("status", run_id)["failure"]["cause"] == "supervisor"


def test_logs_of_a_run_that_waits_are_empty_until_it_starts(cli: Cli) -> None:
    cores = len(os.sched_getaffinity(0))
    holder = cli.submit("import time; time.sleep(600)", "-j", str(cores), "--backend", "gloo")
    cli.wait(holder, "Running")
    waiting = cli.submit("print('my turn')")
    assert cli("logs", waiting).stdout == ""
    following = cli.start("logs", "-f", waiting)
    time.sleep(0.3)
    cli("cancel", holder)

    assert following.communicate(timeout=180) == ("my turn\n", "")
