"""`paceline schedule`, as users type it: real runs, and looks that are killed at any time."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest

from paceline.errors import ScheduleError
from paceline.workspace import Workspace
from tests.cli.conftest import Cli

FILE = """
entry_script: train.py
source_directory: src
experiment: nightly
script_params:
  --lr: ${lr:0.1}
  --because: ${trigger:hand}
"""
PAST = "2025-06-01T00:00:00.000Z"


@pytest.fixture
def lab(cli: Cli) -> Cli:
    cli.script("import sys; print(*sys.argv[1:])")
    cli.script(FILE, "job.yaml")
    return cli


def add(cli: Cli, *words: object, code: int = 0) -> str:
    done = cli("schedule", "add", "--timer", "none", *words, code=code)
    return done.stdout + done.stderr


def make_old(cli: Cli, name: str = "job") -> None:
    """As if the schedule had been added long ago."""
    path = cli.folder / ".paceline" / "schedules" / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "created_utc": PAST}))


@pytest.mark.promise("schedules")
def test_schedule_tick_starts_an_overdue_run_once_with_its_parameters_and_reports_it_as_late(lab: Cli) -> None:
    assert "Next:" in add(lab, "0 3 1 1 *", "job.yaml", "lr=5", "--time-zone", "Asia/Tokyo")
    lab("schedule", "tick")
    assert lab.run_ids() == []
    make_old(lab)

    lab("schedule", "tick")

    (run_id,) = lab.run_ids()
    assert lab.wait(run_id) == "Completed"
    log = (lab.run_folder(run_id) / "logs" / "rank_0.log").read_text()
    assert re.search(r"--lr 5 --because 20\d\d-12-31T18:00:00\+00:00", log)
    shown = lab.json("schedule", "show", "job")
    assert shown["time_zone"] == "Asia/Tokyo"
    assert [one["run_id"] for one in shown["occurrences"]] == [run_id]
    assert shown["occurrences"][0]["late"]
    lab("schedule", "tick")
    assert lab.json("schedule", "list")[0]["state"].startswith("Completed")
    assert lab.run_ids() == [run_id]
    assert lab.json("list")[0]["tags"]["schedule"] == "job"
    assert "late, at" in lab("schedule", "show", "job").stdout


def test_schedule_is_paused_resumed_run_by_hand_and_removed(lab: Cli) -> None:
    lab("template", "add", "kept", "job.yaml")
    add(lab, "0 3 1 1 *", "--template", "kept", "--name", "one", "--", "x")
    lab("schedule", "pause", "one")
    make_old(lab, "one")
    lab("schedule", "tick")
    assert lab.run_ids() == []
    assert "paused" in lab("schedule", "list").stdout
    started = lab("schedule", "run", "one").stdout.strip()
    assert lab.wait(started) == "Completed"
    assert (lab.run_folder(started) / "logs" / "rank_0.log").read_text() == "x\n"
    assert lab.json("schedule", "show", "one")["last"]["run_status"] == "Completed", "before the timer's next check"
    assert "of the pause starts nothing" in lab("schedule", "resume", "one").stdout
    lab("schedule", "tick")
    assert lab.run_ids() == [started]
    lab("schedule", "remove", "one")
    assert "There is no schedule." in lab("schedule", "list").stdout
    assert "there is no schedule 'one'" in lab("schedule", "pause", "one", code=2).stderr


def test_run_started_by_the_schedule_run_command_gets_the_text_by_hand_as_its_trigger(lab: Cli) -> None:
    add(lab, "@daily", "job.yaml")
    started = lab("schedule", "run", "job").stdout.strip()
    assert lab.wait(started) == "Completed"
    assert (lab.run_folder(started) / "logs" / "rank_0.log").read_text() == "--lr 0.1 --because by hand\n"


@pytest.mark.promise("schedule-triggers")
def test_schedule_starts_a_run_when_a_model_gets_a_new_version_or_when_another_run_has_ended(lab: Cli) -> None:
    lab.script("import paceline as pl, sys; pl.Dataset.File.from_files(sys.argv[1]).register(pl.Workspace.from_config(),"
               "'mnist', create_new_version=True)", "register.py")  # fmt: skip
    lab.script("weights", "model.bin")
    lab("model", "register", "digits", "model.bin")
    first = lab("submit", "-e", "train", "src/train.py").stdout.strip()
    lab.wait(first)
    for words in (("--on-model", "digits"), ("--after", "train"), ("--after", first)):
        name = "-".join(words).strip("-").replace("_", "-")
        add(lab, *words, "job.yaml", "--name", name)
    lab("schedule", "tick")
    (after_first,) = set(lab.run_ids()) - {first}
    lab.script("other weights", "model.bin")
    lab("model", "register", "digits", "model.bin")
    second = lab("submit", "-e", "train", "src/train.py").stdout.strip()
    for run_id in (after_first, second):
        lab.wait(run_id)

    lab("schedule", "tick")

    logs = {}
    for run_id in set(lab.run_ids()) - {first, second}:
        assert lab.wait(run_id) == "Completed"
        logs[(lab.run_folder(run_id) / "logs" / "rank_0.log").read_text().split()[-1]] = run_id
    assert set(logs) == {first, second, "digits:2"}
    lab("schedule", "tick")
    assert len(lab.run_ids()) == 5


SWEEP = """
entry_script: tune.py
source_directory: src
script_params: {--because: "${trigger:hand}"}
sweep:
  space: {lr: [1, 2]}
  metric: ${metric:none}
  trials: 2
"""
PIPELINE = """
source_directory: src
parameters: {epochs: 3, trigger: hand}
steps:
  one: {entry_script: train.py, arguments: [one, $epochs, $trigger]}
  two: {entry_script: train.py, arguments: [two], after: [one]}
"""


@pytest.mark.parametrize(
    ("name", "text", "words", "said"),
    [
        ("sweep", SWEEP, ["metric=accuracy"], "--because by hand"),
        ("pipeline", PIPELINE, ["epochs=5"], "one 5 by hand"),
    ],
)
def test_schedule_starts_a_sweep_or_a_pipeline_from_its_file_once(
    lab: Cli, name: str, text: str, words: list[str], said: str
) -> None:
    tune = "import sys, paceline; print(*sys.argv[1:]); paceline.Run.get_context().log('accuracy', 0.5)"
    lab.script(tune, "src/tune.py")
    lab.script(text, f"{name}.yaml")
    add(lab, "0 3 1 1 *", f"{name}.yaml", *words)
    started = lab("schedule", "run", name).stdout.strip()
    assert lab.wait(started) == "Completed"
    children = [run_id for run_id in lab.run_ids() if run_id != started]
    assert len(children) == 2
    logs = [(lab.run_folder(run_id) / "logs" / "rank_0.log").read_text() for run_id in children]
    assert any(said in log for log in logs), logs
    assert lab.json("list")[0]["tags"] == {"schedule": name, "trigger": "by hand"}
    make_old(lab, name)
    lab("schedule", "tick")
    lab("schedule", "tick")
    (again, _) = lab.json("schedule", "show", name)["occurrences"]
    assert lab.wait(again["run_id"]) == "Completed"
    assert len([row for row in lab.json("list") if row["tags"].get("schedule") == name]) == 2


def test_schedule_of_a_broken_sweep_or_pipeline_is_refused(lab: Cli) -> None:
    lab.script("", "src/tune.py")
    lab.script(SWEEP, "sweep.yaml")
    lab.script(PIPELINE, "pipeline.yaml")
    lab.script(PIPELINE.replace("train.py, arguments: [two]", "none.py"), "broken.yaml")
    for words, text in (
        (("sweep.yaml", "metrik=x"), "Did you mean 'metric'?"),
        (("pipeline.yaml", "epoch=5"), "epoch"),
        (("pipeline.yaml", "--", "x"), "takes parameters (NAME=VALUE), but no arguments"),
        (("broken.yaml",), "none.py"),
    ):
        assert text in add(lab, "@daily", *words, code=2), words
    assert lab.json("schedule", "list") == []


def test_invalid_schedule_is_refused_and_not_stored(lab: Cli) -> None:
    lab.script(FILE + "secrets: [HF_TOKEN]\n", "secret.yaml")
    lab.script(FILE + "notify: ['slack:env:HOOK']\n", "notify.yaml")
    lab.script(FILE.replace("train.py", "none.py"), "none.yaml")
    for words, text in (
        (("0 3 * *", "job.yaml"), "five fields"),
        (("job.yaml",), "say when: a cron expression such as '0 3 * * *'"),
        (("0", "3", "*", "*", "*", "job.yaml"), "got '0', or --template NAME"),
        (("@daily",), "name a job file that ends with .yaml"),
        (("@daily", "job.yaml", "lrr=1"), "Did you mean 'lr'?"),
        (("@daily", "job.yaml", "--overlap", "kill"), "--overlap 'kill' must be one of queue, skip"),
        (("@daily", "job.yaml", "--ended", "any"), "--ended any belongs to --after"),
        (("@daily", "job.yaml", "--time-zone", "Mars"), "time zone 'Mars' is not known"),
        (("--on-model", "m", "job.yaml", "--time-zone", "UTC"), "--time-zone UTC belongs to a cron expression"),
        (("--on-model", "m", "job.yaml", "--missed", "once"), "--missed once belongs to a cron expression"),
        (("@daily", "job.yaml", "lr=1", "--", "x"), "lr=1 has no effect: the arguments behind `--` replace"),
        (("--after", "nothing", "job.yaml"), "--after 'nothing' is neither an experiment with runs nor a run"),
        (("@daily", "job.yaml", "--name", "a b"), "the schedule's name 'a b' must begin"),
        (("@daily", "none.yaml"), "none.py"),
        (("@daily", "secret.yaml"), "env:HF_TOKEN is a variable of your shell, which a timer does not have"),
        (("@daily", "notify.yaml"), "env:HOOK is a variable of your shell, which a timer does not have"),
    ):
        done = lab("schedule", "add", "--timer", "none", *words, env={"HF_TOKEN": "x", "HOOK": "https://x"}, code=2)
        assert text in done.stderr, words
    assert lab.json("schedule", "list") == []
    add(lab, "@daily", "job.yaml")
    assert "a schedule 'job' exists already" in add(lab, "@daily", "job.yaml", code=2)


def test_schedule_is_added_from_python(lab: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    workspace = Workspace(lab.folder / ".paceline")
    options = {"name": "nightly", "parameters": {"lr": 0.2}, "time_zone": "UTC", "timer": "none"}

    made = workspace.schedules.add("0 3 * * *", lab.folder / "job.yaml", **options)  # type: ignore[arg-type]

    assert (made.name, made.when, dict(made.parameters)) == ("nightly", "0 3 * * * (UTC)", {"lr": "0.2"})
    assert [*workspace.schedules] == ["nightly"]
    workspace.schedules.pause("nightly")
    assert workspace.schedules["nightly"].is_paused
    with pytest.raises(ScheduleError, match="exists already"):
        workspace.schedules.add("0 3 * * *", lab.folder / "job.yaml", **options)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        workspace.schedules["other"]


def test_schedule_list_warns_if_a_scheduled_time_has_passed_and_schedule_tick_was_never_called(lab: Cli) -> None:
    add(lab, "@yearly", "job.yaml")
    assert "no timer has looked" not in lab("schedule", "list").stderr
    make_old(lab)

    assert "no timer has looked at these schedules yet." in lab("schedule", "list").stderr
    lab("schedule", "tick")
    assert "no timer has looked" not in lab("schedule", "list").stderr


def test_schedule_list_shows_other_schedules_beside_one_in_an_unknown_time_zone(lab: Cli) -> None:
    for name in ("a", "b"):
        add(lab, "0 3 1 1 *", "job.yaml", "--name", name, "--time-zone", "UTC")
    path = lab.folder / ".paceline" / "schedules" / "a.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time_zone": "Gone/Nowhere"}))

    done = lab("schedule", "list")

    assert "paceline: schedule a: time zone 'Gone/Nowhere' is not known here." in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["SCHEDULE", "a", "b"]
    assert [row["next_utc"] is None for row in lab.json("schedule", "list")] == [True, False]


@pytest.mark.promise("schedule-never-twice")
def test_schedule_tick_starts_a_due_run_exactly_once_after_earlier_schedule_ticks_were_killed(lab: Cli) -> None:
    add(lab, "0 3 1 1 *", "job.yaml")
    make_old(lab)
    # `schedule tick` submits the run as its last action, so half of the kills hit the submission.
    chance = random.Random(7)
    began = time.monotonic()
    lab("schedule", "list")
    took = time.monotonic() - began
    for _ in range(6):
        look = lab.start("schedule", "tick")
        time.sleep(took * chance.uniform(0.5, 2))
        look.kill()
        look.communicate()

    lab("schedule", "tick")

    (run_id,) = lab.run_ids()
    assert lab.wait(run_id) == "Completed"
    lab("schedule", "tick")
    (row,) = lab.json("schedule", "show", "job")["occurrences"]
    assert (row["run_id"], row["run_status"]) == (run_id, "Completed")
    assert lab.json("list")[0]["tags"]["schedule"] == "job"
    assert Path(lab.run_folder(run_id) / "snapshot").exists()
