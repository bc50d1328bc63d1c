"""status, list and show: their text, and the keys of their JSON, to which versions only add."""

from __future__ import annotations

import json
import math
import os
import re
import shutil

import pytest

from paceline.cli.read import _folded
from paceline.job.job import JOB_VERSION
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.workspace import Workspace
from tests.cli.conftest import Cli, Gallery
from tests.helpers import make_job, make_run

#: Pattern of a run's readable name.
NAME = r"[a-z]+-[a-z]+-\d+"

SUMMARY_KEYS = [
    "run_id",
    "status",
    "experiment",
    "display_name",
    "type",
    "target",
    "node_count",
    "world_size",
    "distributed_backend",
    "size",
    "command",
    "latest_metrics",
    "attempts",
    "created_utc",
    "started_utc",
    "ended_utc",
    "duration_s",
    "waiting_for",
    "exit_code",
    "failure",
    "hang",
    "warnings",
    "left_out",
    "left_out_count",
    "parent_run_id",
    "tags",
    "folder",
]
DETAIL_KEYS = [
    "properties",
    "description",
    "submitted_by",
    "canceled_by",
    "source_directory",
    "snapshot_id",
    "not_copied",
    "git",
    "job",
    "environment",
    "data",
    "load",
    "attempt_records",
    "trial",
    "step",
    "models",
    "metrics",
    "files",
    "size_bytes",
]
FAILURE_KEYS = [
    "cause",
    "message",
    "exit_code",
    "attempt",
    "rank",
    "node",
    "signal",
    "exception",
    "traceback",
    "last_lines",
    "victims",
    "see",
]


def test_status_prints_the_state_and_the_first_failure_of_a_failed_run(gallery: Gallery) -> None:
    first, second = gallery("status", gallery.bad).stdout.splitlines()

    assert re.match(rf"{gallery.bad} \({NAME}\)  Failed", first)
    assert second == "Rank 1 on node local failed first: ValueError: bad batch"


def test_status_with_json_prints_the_summary_fields_of_a_run(gallery: Gallery) -> None:
    found = gallery.json("status", gallery.good)

    assert list(found) == SUMMARY_KEYS
    assert (found["run_id"], found["status"], found["exit_code"]) == (gallery.good, "Completed", 0)
    assert (found["node_count"], found["world_size"], found["attempts"], found["failure"]) == (1, 1, 1, None)
    assert found["tags"] == {"a": "1", "bare": None}
    assert found["duration_s"] > 0
    assert gallery.json("status", gallery.bad)["failure"]["cause"] == "exception"


def test_run_is_found_by_id_prefix_and_the_latest_by_default(gallery: Gallery) -> None:
    assert gallery.json("status", gallery.good[:6])["run_id"] == gallery.good
    assert gallery.json("status")["run_id"] == gallery.bad


def test_list_is_a_plain_table_newest_first(gallery: Gallery) -> None:
    lines = gallery("list").stdout.splitlines()

    assert lines[0].split()[:7] == ["RUN", "NAME", "STATUS", "SIZE", "CREATED", "TOOK", "SCRIPT"]
    assert lines[0].split()[-1] == "METRIC"
    assert all(re.fullmatch(NAME, line.split()[1]) for line in lines[1:])
    assert [line.split()[:1] + line.split()[2:4] for line in lines[1:]] == [
        [gallery.bad, "Failed", "1x2"],
        [gallery.good, "Completed", "1x1"],
    ]
    header, *rows = gallery("list", "--long").stdout.splitlines()
    assert [line[header.index("BACKEND") :].split()[0] for line in rows] == ["gloo", "-"]
    assert not any("\x1b" in line for line in lines)


def test_list_has_a_target_column_if_a_run_used_another_target_than_local(gallery: Gallery, cli: Cli) -> None:
    shutil.copytree(gallery.folder / ".paceline" / "runs", cli.folder / ".paceline" / "runs", symlinks=True)
    path = cli.run_folder(gallery.bad) / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target": "lab"}))

    lines = cli("list").stdout.splitlines()
    assert [line.split()[:1] + line.split()[2:5] for line in lines] == [
        ["RUN", "STATUS", "TARGET", "SIZE"],
        [gallery.bad, "Failed", "lab", "1x2"],
        [gallery.good, "Completed", "local", "1x1"],
    ]
    assert [run["target"] for run in cli.json("list")] == ["lab", "local"]


def test_list_with_json_prints_summary_fields_and_metrics_of_each_run(gallery: Gallery) -> None:
    found = gallery.json("list")

    assert [run["run_id"] for run in found] == [gallery.bad, gallery.good]
    facts = ["script", "params", "main_metric", "metric_summaries", "resources"]
    assert all(list(run) == [*SUMMARY_KEYS, *facts] for run in found)
    assert found[1]["metric_summaries"]["accuracy"]["best"] == 0.5


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["-e", "good"], ["good"]),
        (["--status", "failed"], ["bad"]),
        (["--tag", "a"], ["good"]),
        (["--tag", "a=1", "--tag", "bare"], ["good"]),
        (["--tag", "a=2"], []),
        (["-n", "1"], ["bad"]),
        (["--all"], ["bad", "good"]),
        (["--status", "Running"], []),
    ],
)
def test_list_shows_only_runs_that_match_the_filter_options(
    gallery: Gallery, words: list[str], names: list[str]
) -> None:
    assert [run["experiment"] for run in gallery.json("list", *words)] == names
    text = gallery("list", *words).stdout
    assert [line.split("_")[0] for line in text.splitlines()[1:] if "older" not in line] == names
    if not names:
        assert text.startswith("No such runs in ")


def test_list_prints_a_note_if_it_is_truncated(gallery: Gallery) -> None:
    assert gallery("list", "-n", "1").stdout.splitlines()[-1] == "... and 1 older ones (--all)"


def test_show_prints_the_fields_metrics_files_and_failure_of_a_run(gallery: Gallery) -> None:
    text = gallery("show", gallery.good).stdout
    fields = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines())

    assert fields["Run"].strip() == gallery.good
    assert fields["Status"].strip().startswith("Completed, ")
    assert fields["Tags"].strip() == "a=1, bare"
    assert fields["Command"].strip() == "src/train.py"
    assert "  loss: 8 values, last 0.25, 0.2, 0.16666666666666666, 0.14285714285714285, 0.125\n" in text
    assert "  accuracy: 0.5\n" in text
    assert "  outputs/model.txt\n" in text
    text = gallery("show", gallery.bad).stdout
    assert "\nFailure (exception):\nRank 1 on node local failed first: ValueError: bad batch\n" in text


def test_show_with_json_prints_all_fields_metrics_and_files_of_a_run(gallery: Gallery) -> None:
    found = gallery.json("show", gallery.good)

    assert list(found) == [*SUMMARY_KEYS, *DETAIL_KEYS]
    assert found["metrics"]["accuracy"] == 0.5
    assert len(found["metrics"]["loss"]) == 8
    # JSON has no NaN, so the output has the string "NaN".
    assert found["metrics"]["nan"] == "NaN"
    assert not any(isinstance(value, float) and math.isnan(value) for value in found["metrics"].values())
    assert found["files"] == ["logs/driver.log", "logs/rank_0.log", "outputs/model.txt"]
    assert found["job"]["version"] == JOB_VERSION
    (attempt,) = found["attempt_records"]
    assert list(attempt) == [
        "number",
        "started_utc",
        "ended_utc",
        "nodes",
        "cores",
        "gpus",
        "exit_codes",
        "cause",
        "world_size",
        "reason",
        "replaced",
    ]
    failure = gallery.json("show", gallery.bad)["failure"]
    assert list(failure) == FAILURE_KEYS
    assert failure["victims"] == [{"rank": 0, "message": "was ended by Paceline because of it."}]


@pytest.mark.promise("nan-infinities-stay-they-json")
def test_json_output_has_no_nan_or_infinity(gallery: Gallery) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    for verb in ("status", "show", "list"):
        json.loads(gallery(verb, "--json").stdout, parse_constant=refuse)


def test_list_of_an_empty_workspace_succeeds_but_status_fails(cli: Cli) -> None:
    assert cli("list").stdout.startswith("No runs in ")
    assert cli.json("list") == []
    for verb in ("status", "show", "logs"):
        assert "there is no run in" in cli(verb, code=2).stderr


def test_output_to_a_pipe_is_colored_only_if_force_color_is_set_and_no_color_is_not(gallery: Gallery) -> None:
    for verb in ("list", "status"):
        assert "\x1b[" not in gallery(verb).stdout
        assert "\x1b[31mFailed" in gallery(verb, env={"FORCE_COLOR": "1"}).stdout
        assert "\x1b[" not in gallery(verb, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
    logs = gallery("logs", gallery.bad, env={"FORCE_COLOR": "1"}).stdout
    assert "\x1b[36m[rank 0] \x1b[0mhello\n" in logs
    assert "\x1b[33m[rank 1] \x1b[0mhello\n" in logs


def test_a_run_whose_record_is_damaged_does_not_hide_the_others(cli: Cli) -> None:
    good, torn, empty = (cli.submit("") for _ in range(3))
    for run_id in (good, torn, empty):
        cli.wait(run_id)
    (cli.run_folder(torn) / "state.json").write_text('{"run_id": "x", "stat')
    (cli.run_folder(empty) / "state.json").unlink()

    assert [run["run_id"] for run in cli.json("list")] == [good]
    assert "no readable record" in cli("status", torn, code=2).stderr


def test_run_is_renamed_and_found_by_its_name(cli: Cli) -> None:
    folder, fd = make_run(Workspace(".paceline").runs_dir, status=states.COMPLETED)
    os.close(fd)
    assert cli("rename", folder.run_id, "warm start").stdout == f"{folder.run_id} (warm start)\n"
    assert "  warm start  " in cli("list").stdout
    assert cli("status", "warm start").stdout.startswith(f"{folder.run_id} (warm start)")
    assert "NAME ' ' is empty. Write a name" in cli("rename", folder.run_id, " ", code=2).stderr


def _log(folder: RunFolder, *values: tuple[str, float], attempt: int = 1) -> None:
    path = folder.metric_log(0, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"name": name, "value": value}) + "\n" for name, value in values))


def test_list_shows_parameters_that_differ_between_runs_and_their_validation_metric(cli: Cli) -> None:
    runs_dir = cli.folder / ".paceline" / "runs"
    for number, rate in enumerate(("0.1", "0.5"), 1):
        job = make_job(arguments=("--rate", rate, "--depth", "18"))
        folder, fd = make_run(runs_dir, f"train_170000000{number}_0000000{number}", states.COMPLETED, job=job)
        os.close(fd)
        _log(folder, ("train_loss", 3), ("val_loss", number / 4), ("train_loss", 2))
    header, *rows = cli("list").stdout.splitlines()
    assert header.split()[6:] == ["SCRIPT", "rate", "METRIC"]
    assert [row.split()[-3:] for row in rows] == [
        ["train.py", "0.5", "val_loss=0.5"],
        ["train.py", "0.1", "val_loss=0.25"],
    ]
    # With only one run, no parameter differs, so the table has no parameter columns.
    assert cli("list", "-n", "1").stdout.split("\n")[0].split()[6:] == ["SCRIPT", "METRIC"]
    found = json.loads(cli("list", "--json").stdout)
    assert found[0]["command"] == "train.py --rate 0.5 --depth 18"
    assert found[1]["latest_metrics"] == {"train_loss": 2, "val_loss": 0.25}
    assert (found[1]["main_metric"], found[1]["params"]) == ("val_loss", {"rate": 0.1, "depth": 18})


def test_list_shows_the_metric_of_an_earlier_attempt_if_the_latest_attempt_has_not_logged_it(cli: Cli) -> None:
    folder, fd = make_run(cli.folder / ".paceline" / "runs", status=states.COMPLETED)
    os.close(fd)
    _log(folder, ("val_acc", 0.9), ("loss", 1))
    # This second attempt ended before it logged val_acc.
    _log(folder, ("loss", 0.5), attempt=2)
    assert "val_acc=0.9" in cli("list").stdout
    (found,) = json.loads(cli("list", "--json").stdout)
    assert found["latest_metrics"] == {"loss": 0.5, "val_acc": 0.9}


def test_list_with_group_prints_the_run_count_and_mean_metric_of_each_parameter_value(cli: Cli) -> None:
    runs_dir = cli.folder / ".paceline" / "runs"
    for number, (rate, acc) in enumerate((("0.1", 0.5), ("0.1", 0.7), ("0.5", 0.9)), 1):
        job = make_job(arguments=("--rate", rate))
        folder, fd = make_run(runs_dir, f"train_170000000{number}_0000000{number}", states.COMPLETED, job=job)
        os.close(fd)
        _log(folder, ("acc", acc))
    # -n limits the number of runs, not the number of rows. The table has all runs of a group.
    header, *rows = cli(
        "list", "--group", "params.rate", "--columns", "metrics.acc,experiment", "-n", "1"
    ).stdout.splitlines()
    assert header.split() == ["params.rate", "RUNS", "metrics.acc", "experiment"]
    assert [row.split() for row in rows] == [
        ["0.5", "1", "0.9", "(1)", "train"],
        ["0.1", "2", "0.6", "±", "0.141", "(2)", "train"],
    ]
    found = json.loads(cli("list", "--group", "params.rate", "--sort", "metrics.acc", "--json").stdout)
    assert [(group["value"], len(group["runs"])) for group in found] == [(0.1, 2), (0.5, 1)]
    assert found[1]["columns"]["metrics.acc"] == {"mean": 0.9, "deviation": None, "count": 1}
    assert "--group: there is no field 'rate'" in cli("list", "--group", "rate", code=2).stderr


def test_list_filters_runs_by_a_query_sorts_them_and_shows_chosen_columns(cli: Cli) -> None:
    runs_dir = cli.folder / ".paceline" / "runs"
    for number, acc in enumerate((0.5, 0.9, 0.7), 1):
        job = make_job(arguments=("--lr", f"1e-{number}"))
        folder, fd = make_run(runs_dir, f"train_170000000{number}_0000000{number}", states.COMPLETED, job=job)
        os.close(fd)
        folder.metric_log(0, 1).write_text(json.dumps({"name": "acc", "value": acc}) + "\n")
    columns = ("--columns", 'id,params.lr, metrics."acc".best,created')
    lines = cli("list", "--where", "metrics.acc > 0.6 state=completed", "--sort", "metrics.acc.best", *columns).stdout
    header, *rows = [line.split() for line in lines.splitlines()]
    assert header == ["id", "params.lr", "metrics.acc.best", "created"]
    assert [row[1:3] for row in rows] == [["0.01", "0.9"], ["0.001", "0.7"]]
    assert len(cli("list", "--where", "metrics.acc > 0.6", "-n", "1").stdout.splitlines()) == 2
    (found,) = json.loads(cli("list", "--where", "metrics.acc < 0.6", "--json").stdout)
    assert found["params"] == {"lr": 0.1}
    assert found["metric_summaries"] == {"acc": {"last": 0.5, "best": 0.5, "min": 0.5, "max": 0.5, "count": 1}}
    assert "No such runs" in cli("list", "--where", "metrics.acc > 5").stdout


def test_list_error_points_at_the_invalid_word_of_a_query(cli: Cli) -> None:
    error = cli("list", "--where", "a and state = faild", code=2).stderr
    assert "'faild' is not a state. Did you mean 'Failed'? Expected: live, NotStarted" in error
    assert error.splitlines()[1:3] == ["  a and state = faild", "                ^"]
    assert "there is no field 'speed'." in cli("list", "--sort", "-speed", code=2).stderr
    assert "--columns: metrics. lacks a name. Expected:" in cli("list", "--columns", "name,metrics.", code=2).stderr


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([f"logs/rank_{rank}.log" for rank in range(16)], [f"logs/rank_{rank}.log" for rank in range(16)]),
        (
            ["logs/driver.log", *sorted(f"logs/rank_{rank}.log" for rank in range(4096)), "outputs/model.pt"],
            ["logs/driver.log", "logs/rank_*.log (4,096 files)", "outputs/model.pt"],
        ),
        (
            ["a1/x", *(f"a1/step_{step}/model_7" for step in range(20)), *(f"b{n}" for n in range(17)), "c1\nd2"],
            ["a1/x", *(f"a1/step_{step}/model_7" for step in range(20)), "b* (17 files)", "c1\nd2"],
        ),
        ([], []),
    ],
    ids=["few", "many", "the last number", "none"],
)
def test_many_numbered_files_are_shown_as_one_pattern(names: list[str], shown: list[str]) -> None:
    assert [*_folded(names)] == shown


def test_comment_command_adds_prints_and_removes_comments_of_a_run(cli: Cli) -> None:
    cli.script("print('done')\n")
    cli("run", "--name", "brave", "src/train.py")
    assert cli("comment", "brave", "Too \x1b[2J fast?\nYes.").stdout.endswith(
        " UTC\n    Too \\x1b[2J fast?\n    Yes.\n"
    )
    cli("comment", "brave", "Lower lr.")
    first, second = cli.json("comment", "brave")
    assert (first["text"], second["text"]) == ("Too \x1b[2J fast?\nYes.", "Lower lr.")
    assert first["author"] == second["author"]
    printed = cli("comment", "brave", "--remove", first["id"]).stdout
    assert (
        printed
        == f"{second['id']}  {second['author']}  {second['time_utc'][:16].replace('T', ' ')} UTC\n    Lower lr.\n"
    )
    assert "there is no comment" in cli("comment", "brave", "--remove", first["id"], code=2).stderr
    assert "a comment has 1 to 2000 characters" in cli("comment", "brave", "", code=2).stderr
    assert "Give one of them" in cli("comment", "brave", "text", "--remove", second["id"], code=2).stderr
