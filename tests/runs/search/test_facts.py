"""The facts of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.search.facts import read_facts
from tests.helpers import make_job, make_run


def ended(tmp_path: Path, run_id: str = "digits_1700000000_00000001", **values: object) -> RunFolder:
    folder, fd = make_run(tmp_path / "runs", run_id, **values)
    store.change(
        folder,
        store.stored(folder),
        states.COMPLETED,
        ended_utc="2026-01-01T00:00:10Z",
        started_utc="2026-01-01T00:00:00Z",
    )
    os.close(fd)
    return folder


def test_searchable_data_of_a_run_has_its_arguments_tags_properties_and_metrics(tmp_path: Path) -> None:
    folder = ended(tmp_path, job=make_job(arguments=("--lr", "0.1", "big")))
    tags_and_properties.set_tags(folder.notes, {"team": "vision", "bare": None})
    tags_and_properties.add_properties(folder.notes, {"depth": "18"})
    tags_and_properties.set_name(folder.notes, "display_name", "first")
    tags_and_properties.set_name(folder.notes, "description", "a try")
    log = MetricLog(folder.metric_log(0))
    log.scalar("loss", 0.5)
    facts = read_facts(folder)
    assert facts is not None
    assert (facts.title, facts.description, facts.script, facts.arguments) == (
        "first",
        "a try",
        "train.py",
        "--lr 0.1 big",
    )
    assert facts.tags == {"team": "vision", "bare": None}
    assert facts.params == {"lr": "0.1 big", "depth": 18}
    assert facts.metrics["loss"].best == 0.5
    assert (facts.duration_s, facts.ended_utc, facts.is_child) == (10.0, "2026-01-01T00:00:10.000Z", False)


def test_searchable_data_of_a_run_of_a_function_has_the_function_name_and_arguments(tmp_path: Path) -> None:
    words = ("--limit", "1000", "pkg.train:main", "--lr", "0.1", "--limit", "3")
    job = make_job(entry_script=None, entry_module="paceline.functions", arguments=words)
    facts = read_facts(ended(tmp_path, job=job))
    assert facts is not None
    assert (facts.script, facts.arguments) == ("pkg.train:main", "--lr 0.1 --limit 3")
    assert facts.params == {"lr": 0.1, "limit": 3}


def test_searchable_data_of_a_trial_has_parameter_values_and_best_metrics_by_the_sweep_goal(tmp_path: Path) -> None:
    ended(
        tmp_path,
        "s_1700000000_00000001",
        kind="sweep",
        sweep={"metric": ["size", "loss"], "goal": ["minimize", "maximize"]},
    )
    trial = ended(
        tmp_path,
        "s_1700000000_00000001_0",
        parent_run_id="s_1700000000_00000001",
        trial={"number": 0, "values": {"lr": 0.5}},
    )
    log = MetricLog(trial.metric_log(0))
    for value in (1.0, 3.0, 2.0):
        log.scalar("size", value)
        log.scalar("loss", value)
    facts = read_facts(trial)
    assert facts is not None
    assert facts.is_child
    assert facts.params == {"lr": 0.5}
    assert (facts.metrics["size"].best, facts.metrics["loss"].best) == (1.0, 3.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"job": 3, "failure": [], "created_utc": 5, "attempts": 7, "hang": "x", "trial": [], "parent_run_id": {}},
        {
            "created_utc": "soon",
            "failure": {"message": 5},
            "job": {"arguments": 5, "node_count": [], "process_count_per_node": {}},
        },
    ],
)
def test_searchable_data_is_read_from_a_run_record_even_if_values_have_wrong_types(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = ended(tmp_path)
    for path in (folder.job, folder.state):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    folder.notes.write_text(
        '{"tag": "a", "value": [1]}\n{"display_name": {"x": 1}}\n{"property": "p", "value": {"q": 2}}\n'
    )
    facts = read_facts(folder)
    assert facts is not None
    assert (facts.name, facts.params) == ("", {})


def test_run_folder_without_a_record_has_no_searchable_data(tmp_path: Path) -> None:
    assert read_facts(RunFolder(tmp_path / "gone")) is None
