"""cancel, and Ctrl-C in `paceline run`: on a terminal it asks, elsewhere it cancels."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from paceline.runs import states
from paceline.system.files import write_json
from paceline.targets.configured import Configured
from paceline.workspace import Workspace
from tests.cli.conftest import Cli
from tests.cli.terminal import Terminal
from tests.helpers import make_run

SLEEP = "import time\nprint('there', flush=True)\ntime.sleep(600)\n"
DEAF = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('there', flush=True)\ntime.sleep(600)\n"
)


def test_cancel_with_wait_cancels_several_runs_and_waits_until_they_have_ended(cli: Cli) -> None:
    runs = [cli.submit(SLEEP) for _ in range(2)]
    done = cli("cancel", "--wait", *runs)

    ends = [f"{run_id}: {word}\n" for word in ("cancel requested", "Canceled") for run_id in runs]
    assert done.stdout == "".join(ends)
    for found in (cli.json("show", run_id) for run_id in runs):
        assert (found["status"], found["exit_code"]) == ("Canceled", 143)
        assert found["canceled_by"]


def test_cancel_with_json_prints_run_id_and_status(cli: Cli) -> None:
    run_id = cli.submit(SLEEP)

    assert cli.json("cancel", run_id, "--wait") == [{"run_id": run_id, "status": "Canceled"}]


def test_cancel_of_an_ended_run_reports_its_state(cli: Cli) -> None:
    run_id = cli.submit("")
    cli.wait(run_id)
    done = cli("cancel", run_id)

    assert (done.stdout, done.stderr) == ("", f"{run_id} is Completed already.\n")
    assert not (cli.run_folder(run_id) / "cancel.json").exists()


def test_run_with_a_killed_ray_head_ends_only_by_cancel_with_force(cli: Cli) -> None:
    # Regression: after Ray's head had stopped listening at its address, the run stayed NotResponding forever, and
    # nothing could end it.
    folder, fd = make_run(Workspace(".paceline").runs_dir, "lab_1_5eed", states.RUNNING, target="ray")
    os.close(fd)
    write_json(folder.target, Configured(name="ray", kind="ray", settings={"address": "http://127.0.0.1:9"}).to_json())
    write_json(folder.engine, {"engine": "ray", "job_id": "paceline-lab_1_5eed"})
    assert cli.json("show", folder.run_id)["status"] == "NotResponding"

    refused = cli("cancel", folder.run_id, code=69)
    assert f"paceline cancel --force {folder.run_id}" in refused.stderr
    assert "written off as Canceled" in cli("cancel", "--force", folder.run_id).stdout
    found = cli.json("show", folder.run_id)
    assert (found["status"], found["exit_code"]) == ("Canceled", 143)
    cli("rm", "--yes", folder.run_id)


def test_cancel_with_force_cancels_a_healthy_running_run_as_without_force(cli: Cli) -> None:
    run_id = cli.submit(SLEEP)
    assert cli("cancel", "--force", "--wait", run_id).stdout == f"{run_id}: cancel requested\n{run_id}: Canceled\n"


def test_cancel_with_an_unknown_run_cancels_nothing(cli: Cli) -> None:
    run_id = cli.submit(SLEEP)
    assert "no run 'nonesuch'" in cli("cancel", run_id, "nonesuch", code=2).stderr

    assert not (cli.run_folder(run_id) / "cancel.json").exists()
    cli("cancel", "--wait", run_id)


@pytest.mark.promise("exit-codes-table-124-time")
def test_interrupting_paceline_run_without_a_terminal_cancels_the_run(cli: Cli) -> None:
    following = cli.start("run", cli.script(SLEEP))
    assert following.stdout is not None
    assert following.stdout.readline() == "there\n"
    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=180)

    assert following.returncode == 130
    assert "Canceling; the workers have their grace period to end.\n" in errors
    assert errors.splitlines()[-1].startswith("Canceled in ")
    (run_id,) = cli.run_ids()
    assert cli.json("status", run_id)["status"] == "Canceled"


@pytest.mark.promise("exit-codes-table-124-time")
def test_interrupting_logs_follow_does_not_cancel_the_run(cli: Cli) -> None:
    run_id = cli.submit(SLEEP)
    following = cli.start("logs", "-f", run_id)
    assert following.stdout is not None
    assert following.stdout.readline() == "there\n"
    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=180)

    assert (following.returncode, errors) == (130, "")
    # A worker's first line may appear before the run's state is Running.
    cli.wait(run_id, "Running")
    assert cli.json("status", run_id)["status"] == "Running"
    cli("cancel", "--wait", run_id)


@pytest.fixture
def terminal(cli: Cli, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """`paceline run` of a script that sleeps, as soon as its run exists."""
    text = getattr(request, "param", SLEEP)
    terminal = Terminal(cli, "run", "--grace", "600" if text == SLEEP else "2", cli.script(text))
    terminal.read_until("there")
    yield terminal
    terminal.close()


QUESTION = "Interrupted. [d]etach and let the run go on, [c]ancel it, or Enter to keep following? "


@pytest.mark.promise("ctrl-c-asks-twice-cancels")
def test_ctrl_c_then_d_detaches_and_the_run_continues(cli: Cli, terminal: Terminal) -> None:
    terminal.press("\x03")
    terminal.read_until(QUESTION)
    terminal.press("d\n")

    assert terminal.exit_code() == 0
    (run_id,) = cli.run_ids()
    assert f"Detached. The run goes on; follow it with: paceline logs -f {run_id}" in terminal.text
    cli.wait(run_id, "Running")
    assert cli.json("status", run_id)["status"] == "Running"
    cli("cancel", "--wait", run_id)


def test_ctrl_c_then_c_cancels_the_run(cli: Cli, terminal: Terminal) -> None:
    terminal.press("\x03")
    terminal.read_until(QUESTION)
    terminal.press("c\n")

    assert terminal.exit_code() == 130
    assert "Canceled in " in terminal.text


@pytest.mark.promise("ctrl-c-asks-twice-cancels")
def test_pressing_ctrl_c_twice_cancels_the_run(cli: Cli, terminal: Terminal) -> None:
    terminal.press("\x03")
    terminal.read_until(QUESTION)
    terminal.press("\x03")

    assert terminal.exit_code() == 130
    assert "Canceling; the workers have their grace period to end." in terminal.text


def test_enter_at_the_ctrl_c_prompt_continues_and_a_second_ctrl_c_cancels_without_a_prompt(
    cli: Cli, terminal: Terminal
) -> None:
    terminal.press("\x03")
    terminal.read_until(QUESTION)
    terminal.press("\n")
    time.sleep(0.3)
    (run_id,) = cli.run_ids()
    assert not (cli.run_folder(run_id) / "cancel.json").exists()
    terminal.press("\x03")

    assert terminal.exit_code() == 130
    assert terminal.text.count(QUESTION) == 1


@pytest.mark.parametrize("terminal", [DEAF], indirect=True)
def test_held_down_ctrl_c_cancels_like_two_presses(cli: Cli, terminal: Terminal) -> None:
    # Each Ctrl-C may interrupt the handler of the previous Ctrl-C.
    terminal.press("\x03")
    terminal.read_until(QUESTION)
    for number in range(300):
        terminal.press("\x03")
        time.sleep(0.0001 * (number % 10))

    assert terminal.exit_code() == 130
    assert terminal.text.count("Canceling; the workers have their grace period to end.") == 1
    (run_id,) = cli.run_ids()
    assert cli.json("show", run_id)["attempt_records"][0]["exit_codes"] == {"0": 137}


def test_run_that_ends_during_the_ctrl_c_prompt_completes_and_the_command_exits_with_0(cli: Cli) -> None:
    script = cli.script(
        "import os, time\nprint('there', flush=True)\nwhile not os.path.exists('outputs/go'): time.sleep(0.01)\n"
    )
    terminal = Terminal(cli, "run", script)
    terminal.read_until("there")
    terminal.press("\x03")
    terminal.read_until(QUESTION)
    (run_id,) = cli.run_ids()
    (cli.run_folder(run_id) / "outputs" / "go").touch()
    assert cli.wait(run_id) == "Completed"
    terminal.press("c\n")

    code = terminal.exit_code()
    terminal.close()
    assert code == 0
    assert "Completed in " in terminal.text


def test_terminal_redraws_a_progress_bar_in_place(cli: Cli) -> None:
    script = cli.script(
        """
        import os, sys, time
        step = 0
        while not os.path.exists("outputs/enough"):
            step += 1
            sys.stdout.write(f"\\rstep {step}")
            time.sleep(0.01)
        print("\\rall steps")
        """
    )
    terminal = Terminal(cli, "run", script)
    terminal.read_until("step")
    (run_id,) = cli.run_ids()
    (cli.run_folder(run_id) / "outputs" / "enough").touch()
    code = terminal.exit_code()
    terminal.close()

    assert code == 0
    assert re.search(r"\n(step \d+\r\x1b\[2K)+all steps\r\n", terminal.text), terminal.text


def test_closed_terminal_does_not_cancel_the_run(cli: Cli) -> None:
    terminal = Terminal(cli, "run", cli.script(SLEEP))
    terminal.read_until("there")
    (run_id,) = cli.run_ids()
    terminal.hang_up()

    assert terminal.process.wait(timeout=180) == -signal.SIGHUP
    assert cli.wait(run_id, "Running") == "Running"
    cli("cancel", "--wait", run_id)
