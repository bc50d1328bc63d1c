"""logs: the output of all workers or of one, from the start or followed live, on a pipe that may be closed early."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time

import pytest

import paceline as pl
from paceline.errors import UserError
from tests.cli.conftest import Cli, Gallery


def test_logs_of_all_ranks_have_the_rank_in_front(gallery: Gallery) -> None:
    lines = gallery("logs", gallery.bad).stdout.splitlines()

    assert sorted(line for line in lines if line.endswith("hello")) == ["[rank 0] hello", "[rank 1] hello"]
    assert lines[-1] == "[rank 1] ValueError: bad batch"


def test_logs_written_to_a_pipe_show_only_the_last_state_of_a_progress_bar(gallery: Gallery) -> None:
    text = gallery("logs", gallery.good).stdout

    assert text == "progress 100%\ndone\n\ufffd\n"


@pytest.mark.promise("logs-one-rank-come-byte")
def test_logs_of_one_rank_are_its_raw_bytes(gallery: Gallery) -> None:
    done = subprocess.run(
        gallery.argv("logs", gallery.good, "--rank", "0"),
        env=gallery.environment,
        cwd=gallery.folder,
        capture_output=True,
        check=True,
    )

    bar = "".join(f"\rprogress {percent}%" for percent in range(0, 101, 20))
    assert done.stdout == bar.encode() + b"\ndone\n\xff\n"


def test_logs_json_prints_one_object_per_line(gallery: Gallery) -> None:
    lines = [json.loads(line) for line in gallery("logs", gallery.bad, "--json").stdout.splitlines()]

    assert all(list(line) == ["attempt", "rank", "text"] for line in lines)
    hello = sorted((line["rank"], line["attempt"]) for line in lines if line["text"] == "hello")
    assert hello == [(0, 1), (1, 1)]
    only = [json.loads(line) for line in gallery("logs", gallery.bad, "--json", "--rank", "1").stdout.splitlines()]
    assert only == [line for line in lines if line["rank"] == 1]


def test_logs_with_driver_shows_the_supervisors_log(gallery: Gallery) -> None:
    assert "failed first: ValueError: bad batch" in gallery("logs", gallery.bad, "--driver").stdout


def test_logs_follow_shows_all_attempts_from_the_start(cli: Cli) -> None:
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
    late = cli.start("logs", "-f", run_id)
    (outputs / "go2").touch()

    assert early.communicate(timeout=180) == ("went on 2\n", "")
    assert late.communicate(timeout=180) == ("attempt 1\nwent on 1\nattempt 2\nwent on 2\n", "")
    assert (early.returncode, late.returncode) == (0, 0)
    assert cli("logs", run_id, "--attempt", "1").stdout == "attempt 1\nwent on 1\n"
    assert cli("logs", run_id, "--rank", "0").stdout == "attempt 1\nwent on 1\nattempt 2\nwent on 2\n"
    assert "has 2 so far" in cli("logs", run_id, "--attempt", "3", code=2).stderr


def test_logs_follow_with_rank_shows_only_the_output_of_that_rank(cli: Cli) -> None:
    run_id = cli.submit("import os; print('rank', os.environ['PACELINE_RANK'])\n", "-j", "2", "--backend", "gloo")

    assert cli("logs", "-f", "--rank", "1", run_id).stdout == "rank 1\n"


def test_logs_follow_of_an_ended_run_exits(gallery: Gallery) -> None:
    assert gallery("logs", "-f", gallery.bad).stdout == gallery("logs", gallery.bad).stdout


def test_logs_follow_shows_an_unfinished_progress_bar_periodically(cli: Cli) -> None:
    # Print steps as tqdm does: each step after a carriage return, and a newline only at the end.
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
    steps: list[int] = []
    # `logs -f` shows the bar about once a second. It may skip steps, and a busy machine may delay the script.
    while len(steps) < 2 or steps[-1] - steps[0] <= 10 * len(steps):
        assert len(steps) < 60, steps
        steps.append(int(following.stdout.readline().removesuffix(" steps\n")))
    (cli.run_folder(run_id) / "outputs" / "enough").touch()
    rest, errors = following.communicate(timeout=180)

    # No step is printed twice.
    assert steps == sorted(set(steps))
    assert rest.splitlines()[-1] == "end"
    assert len(rest.splitlines()) < 10
    assert errors == ""


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_closed_pipe_ends_logs_without_an_error(cli: Cli, follow: list[str]) -> None:
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


def test_closed_pipe_of_paceline_run_does_not_end_the_run(cli: Cli) -> None:
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


def test_logs_follow_exits_if_the_supervisor_of_the_run_is_killed(cli: Cli) -> None:
    run_id = cli.submit("import time; print('there', flush=True); time.sleep(600)")
    following = cli.start("logs", "-f", run_id)
    assert following.stdout is not None
    assert following.stdout.readline() == "there\n"
    record = json.loads((cli.run_folder(run_id) / "state.json").read_text())
    os.kill(record["owner"]["pid"], 9)

    following.communicate(timeout=180)
    assert following.returncode == 0
    assert cli.json("status", run_id)["failure"]["cause"] == "supervisor"


def test_logs_of_a_queued_run_are_empty_until_it_starts(cli: Cli) -> None:
    cores = len(os.sched_getaffinity(0))
    holder = cli.submit("import time; time.sleep(600)", "-j", str(cores), "--backend", "gloo")
    cli.wait(holder, "Running")
    waiting = cli.submit("print('my turn')")
    assert cli("logs", waiting).stdout == ""
    following = cli.start("logs", "-f", waiting)
    time.sleep(0.3)
    cli("cancel", holder)

    assert following.communicate(timeout=180) == ("my turn\n", "")


# --- tests of the last lines of a log (-n, --since)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """`good`: two attempts of two workers, 50 lines each, and then one that rank 1 does not end."""
    cli = Gallery(tmp_path_factory.mktemp("long"))
    cli.good = cli.submit(
        """
        import os, signal, sys, time
        attempt, rank = os.environ["PACELINE_ATTEMPT"], int(os.environ["PACELINE_RANK"])
        here = lambda name: os.path.join("outputs", name)
        if rank == 1:
            while not os.path.exists(here("zero" + attempt)):
                time.sleep(0.01)
            time.sleep(0.5)  # so that the notes tell who was first
        for number in range(50):
            print("line", attempt, number)
        open(here(("zero", "one")[rank] + attempt), "w")
        while not os.path.exists(here("one" + attempt)):
            time.sleep(0.01)
        if attempt == "1":
            time.sleep(600) if rank else (time.sleep(0.3), os.kill(os.getpid(), signal.SIGKILL))
        if rank == 1:
            sys.stdout.write("no end")
        """,
        *("-j", "2", "--backend", "gloo", "--max-restarts", "1"),
    )
    assert cli.wait(cli.good) == "Completed"
    return cli


def test_logs_with_tail_prints_the_last_lines_of_the_whole_log(long: Gallery) -> None:
    everything = long("logs", long.good).stdout.splitlines()
    assert len(everything) == 201
    assert everything[-1] == "[2: rank 1] no end"
    for count in (0, 1, 10, 60, 130, 200, 500):
        assert long("logs", long.good, "--tail", count).stdout.splitlines() == everything[max(0, 201 - count) :]
    assert long("logs", long.good, "-f", "-n", "3").stdout.splitlines() == everything[-3:]
    assert [json.loads(line)["text"] for line in long("logs", long.good, "-n", "2", "--json").stdout.splitlines()] == [
        "line 2 49",
        "no end",
    ]
    of_one = long("logs", long.good, "--rank", "1").stdout
    assert long("logs", long.good, "--rank", "1", "-n", "53").stdout == "".join(of_one.splitlines(keepends=True)[-53:])
    first = [line for line in everything if line.startswith("[1:")]
    assert long("logs", long.good, "--attempt", "1", "-n", "2").stdout.splitlines() == first[-2:]
    driver = long("logs", long.good, "--driver").stdout.splitlines()
    assert long("logs", long.good, "--driver", "-n", "2").stdout.splitlines() == driver[-2:]


def test_logs_since_shows_later_lines_only(long: Gallery) -> None:
    record = long.json("show", long.good)
    everything = long("logs", long.good).stdout.splitlines()
    second = record["attempt_records"][1]["started_utc"]
    of_second = [line for line in everything if line.startswith("[2:")]

    assert long("logs", long.good, "--since", second).stdout.splitlines() == of_second
    assert long("logs", long.good, "--since", "1w").stdout.splitlines() == everything
    assert long("logs", long.good, "--since", "1w", "-n", "3").stdout.splitlines() == everything[-3:]
    assert long("logs", long.good, "--since", second, "-n", "150").stdout.splitlines() == of_second
    assert long("logs", long.good, "--since", "0s").stdout == ""
    assert long("logs", long.good, "-f", "--since", "0s").stdout == ""
    driver = long("logs", long.good, "--driver").stdout
    # The driver log's last line may report the end of the first attempt, some seconds before the second attempt begins.
    last = driver.splitlines()[-1]
    moment = last[: len("2026-01-01 00:00:00Z")].replace(" ", "T")
    since = long("logs", long.good, "--driver", "--since", moment).stdout
    assert since.splitlines()[-1] == last
    assert driver.endswith(since)
    assert driver.endswith(long("logs", long.good, "--driver", "--since", second).stdout)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--since", "yesterday"], "--since 'yesterday' is neither a duration"),
        (["--since", "2026-13-01"], "is neither a duration"),
        (["--since", "2999-01-01"], "that is still to come"),
        (["--tail", "-1"], "'-1' must be a number of lines."),
        (["--tail", "few"], "'few' must be a number of lines."),
        (["--lines", "5"], "No such option: --lines, which is tail's. Here: -n 5, or --tail 5."),
        (["--lines=5"], "Here: -n 5, or --tail 5."),
        (["--colour"], "No such option: --colour"),
        (["--prepare", "--since", "1h"], "carry no time"),
        (["--driver", "-f"], "leave it out, or --driver"),
    ],
)
def test_invalid_or_contradictory_logs_options_are_refused(gallery: Gallery, words: list[str], complaint: str) -> None:
    done = gallery("logs", gallery.good, *words, code=2)
    assert complaint in done.stderr
    assert done.stdout == ""


# --- tests of logs on a terminal

NASTY = r"\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\a end\x1b[1A"


def on_a_terminal(cli: Cli, *words: object) -> str:
    """What the command writes to a terminal."""
    ours, theirs = os.openpty()
    process = cli.start(*words, stdout=theirs, stderr=theirs)
    os.close(theirs)
    data = b""
    with contextlib.suppress(OSError):  # reading fails with EIO when the terminal ends
        while piece := os.read(ours, 1 << 16):
            data += piece
    os.close(ours)
    assert process.wait(timeout=180) == 0
    return data.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    cli = Gallery(tmp_path_factory.mktemp("nasty"))
    cli.good = cli.submit(f'print("{NASTY}")\nprint("\\r10%\\r100%")\n', "--tag", "t=\x1b[31mred\x1b[2J")
    assert cli.wait(cli.good) == "Completed"
    return cli


@pytest.mark.promise("nothing-terminal-obeys-gets-through")
@pytest.mark.parametrize("words", [[], ["--rank", "0"], ["-f"], ["-n", "5"]])
def test_terminal_output_keeps_colors_and_escapes_other_sequences(nasty: Gallery, words: list[str]) -> None:
    assert on_a_terminal(nasty, "logs", nasty.good, *words) == "\x1b[31mred\x1b[0m\\x07 end\n100%\n"


def test_logs_written_to_a_pipe_or_with_raw_keep_control_characters_unescaped(nasty: Gallery) -> None:
    line = NASTY.encode().decode("unicode_escape") + "\n"
    assert nasty("logs", nasty.good).stdout == f"{line}100%\n"
    assert on_a_terminal(nasty, "logs", nasty.good, "--raw") == f"{line}100%\n"
    assert nasty("logs", nasty.good, "--rank", "0").stdout == f"{line}\n10%\n100%\n"


def test_control_characters_in_a_tag_are_escaped_by_show_and_list(nasty: Gallery) -> None:
    assert "t=\\x1b[31mred\\x1b[2J" in nasty("show", nasty.good).stdout
    assert "\x1b" not in nasty("list").stdout


def test_run_with_json_escapes_control_characters_if_stderr_is_a_terminal(nasty: Gallery) -> None:
    """Regression: the command checked whether standard output is a terminal. But it was a pipe, and the lines go to
    standard error."""
    ours, theirs = os.openpty()
    with nasty.start("rerun", nasty.good, "--json", stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # reading fails with EIO when the terminal ends
            while piece := os.read(ours, 1 << 16):
                shown += piece
        os.close(ours)
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    assert found["status"] == "Completed"
    assert "\x1b[31mred\x1b[0m\\x07 end\r\n" in shown.decode()


#: This script starts two processes as torchrun does. Each process prints and logs under its own rank.
LAUNCHES = """
    import os, subprocess, sys
    own = "import os, paceline; rank = int(os.environ['RANK']); print('[rank 1] is said by', rank); "
    own += "paceline.Run.get_context().log('loss', rank + 0.5)"
    print("launches", flush=True)
    for rank in "01":
        place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "none"}
        subprocess.run([sys.executable, "-c", own], env=os.environ | place, check=True)
    if os.environ["PACELINE_ATTEMPT"] == "1":
        raise ValueError("once")
    """


@pytest.mark.promise("ranks-script-starts-itself-recognised")
def test_ranks_started_by_a_script_have_separate_logs(cli: Cli) -> None:
    cli("run", "--max-restarts", 1, "--restart-on-exception", cli.script(LAUNCHES))
    (run_id,) = cli.run_ids()
    first, second = "launches\n[rank 1] is said by 0\n", "[rank 1] is said by 1\n"

    assert cli("logs", "--rank", 1).stdout == second * 2
    assert cli("logs", "--rank", 0, "--attempt", 2).stdout == first
    assert cli("logs", "--attempt", 2, "--tail", 1).stdout == f"[2: rank 1] {second}"
    assert cli("logs", "--rank", 2, code=2).stderr.startswith("paceline: error: --rank 2: ")
    assert (cli.run_folder(run_id) / "logs" / "rank_1.log").read_text() == second
    assert cli.json("metrics", "--rank", 1)[0]["metrics"]["loss"]["last"] == 1.5
    assert "run {run_id} has ranks 0 to 1" in cli("metrics", "--rank", 9, code=2).stderr.replace(run_id, "{run_id}")

    run = pl.Run.get(pl.Workspace(cli.folder / ".paceline"), run_id)
    assert run.metrics("loss", rank=1, attempt=2).values == (1.5,)
    with pytest.raises(UserError, match="has rank 0 to 1"):
        run.metrics(rank=2)


def test_output_that_looks_like_a_rank_prefix_is_not_split_into_rank_logs(cli: Cli) -> None:
    cli("run", cli.script("print('[rank 1] is said by 0')"))
    assert cli("logs").stdout == "[rank 1] is said by 0\n"
    refused = cli("logs", "--rank", 1, code=2).stderr
    assert "has rank 0 alone. Leave --rank out to see all." in refused
