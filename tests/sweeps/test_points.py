"""A point as its script gets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import JobError, SweepError
from paceline.job.job import Job
from paceline.sweeps.points import as_switch, check_way, job_of, words
from paceline.sweeps.space import Space

NESTED = {"--lr": 0.1, "model.layers": 2, "model.kind": None, "sizes": [1, 2], "fast": True}


def test_sampled_values_replace_the_arguments_given_in_the_job() -> None:
    job = Job(entry_script="train.py", arguments=("--lr", "-0.5", "--epochs", "3", "--batch=4", "--fast", "data"))
    found = job_of(job, {"--lr": 0.1, "batch": 8})
    assert found.arguments == ("--epochs", "3", "--fast", "data", "--lr", "0.1", "--batch", "8")


@pytest.mark.promise("switch-script-s-tuned-like")
def test_boolean_switches_are_passed_without_a_value() -> None:
    job = Job(entry_script="train.py", arguments=("--fast", "data", "--no-amp", "--lr", "1"))
    switches = ("--fast", "--amp/--no-amp")
    found = job_of(job, {"fast": True, "--amp": False, "lr": 2}, switches=switches)
    assert found.arguments == ("data", "--fast", "--no-amp", "--lr", "2")
    assert job_of(job, {"fast": False, "amp": True}, switches=switches).arguments == ("data", "--lr", "1", "--amp")
    assert [as_switch(name) for name in ("amp", "--amp", "-a", "amp/no-amp")] == [
        *("--amp", "--amp", "-a", "--amp/--no-amp"),
    ]


def test_parameter_values_are_passed_as_command_line_arguments() -> None:
    assert words({"a": True, "b": [1, 2], "c": None, "d": "x y", "-e": 1e-5, "f": {"g": 1}}) == [
        *("--a", "True", "--b", "[1, 2]", "--d", "x y", "-e", "1e-05", "--f", '{"g": 1}'),
    ]
    # argparse would take these values for options.
    assert words({"a": -0.5, "b": -1e-5, "c": "-x"}) == ["--a", "-0.5", "--b=-1e-05", "--c=-x"]


def test_parameter_values_are_passed_as_name_value_arguments() -> None:
    job = Job(entry_script="train.py", arguments=("lr=1", "lr", "data=mnist", "--cfg"))
    assert job_of(job, NESTED, "assignments").arguments == (
        *("lr", "data=mnist", "--cfg", "lr=0.1", "model.layers=2", "sizes=[1, 2]", "fast=True"),
    )


def test_parameter_values_are_passed_as_environment_variables() -> None:
    job = Job(entry_script="train.py", arguments=("--lr", "1"), environment_variables={"lr": "1", "X": "y"})
    found = job_of(job, NESTED, "environment")
    assert found.arguments == job.arguments
    assert found.environment_variables == {
        **{"lr": "0.1", "X": "y", "model_layers": "2", "sizes": "[1, 2]", "fast": "True"},
    }
    with pytest.raises(JobError, match="PACELINE_RANK"):
        job_of(job, {"PACELINE_RANK": 1}, "environment")


@pytest.mark.promise("script-gets-values-arguments-assignments")
def test_parameter_values_are_merged_into_a_file_of_the_source(tmp_path: Path) -> None:
    job = Job(entry_script="train.py")
    inner = {"lr": 0.1, "model": {"layers": 2, "kind": None}, "sizes": [1, 2], "fast": True}
    assert json.loads(job_of(job, NESTED, "p.json", tmp_path).files["p.json"]) == inner
    (tmp_path / "p.json").write_text('{"model": {"layers": 9, "width": 3}, "epochs": 5}')
    assert json.loads(job_of(job, NESTED, "p.json", tmp_path).files["p.json"]) == {
        **inner,
        "model": {"layers": 2, "kind": None, "width": 3},
        "epochs": 5,
    }
    wrong = {
        "must be JSON:": "{",
        "must be a JSON object": "[1]",
        "'model' in 'p.json' of the source is no": '{"model": 1}',
    }
    for said, text in wrong.items():
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(SweepError) as caught:
            job_of(job, NESTED, "p.json", tmp_path)
        assert said in str(caught.value)


def test_invalid_pass_as_value_or_a_parameter_name_that_it_can_not_pass_is_refused() -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (
            "yaml",
            {"a": 1},
            "pass_as='yaml': write one of arguments, equals, words, repeated, commas, assignments, additions, environment, a ",
        ),
        (3, {"a": 1}, "pass_as=3"),
        ("/a.json", {"a": 1}, "not a path below"),
        ("../a.json", {"a": 1}, "not a path below"),
        ("outputs/a.json", {"a": 1}, "not a path below"),
        ("environment", {"a.b": 1, "a_b": 2}, "are one variable of the environment, a_b"),
        ("environment", {"2x": 1}, "'2x' can be no variable"),
        ("p.json", {"k": pl.choice({"--a": 1, "--a.b": 1}, {})}, "'a' and 'a.b'"),
    ]
    for way, space, said in wrong:
        with pytest.raises(SweepError) as caught:
            check_way(way, Space(space))
        assert said in str(caught.value)
    check_way("environment", Space({"--lr": 1, "model": {"layers": 2}}))
