"""A point as words on a command line."""

from __future__ import annotations

from paceline.job.job import Job
from paceline.sweeps.points import job_of, words


def test_values_come_after_the_jobs_own_words_and_in_place_of_those_that_say_the_same() -> None:
    job = Job(entry_script="train.py", arguments=("--lr", "-0.5", "--epochs", "3", "--batch=4", "--fast", "data"))
    found = job_of(job, {"--lr": 0.1, "batch": 8})
    assert found.arguments == ("--epochs", "3", "--fast", "data", "--lr", "0.1", "--batch", "8")


def test_values_are_words() -> None:
    assert words({"a": True, "b": [1, 2], "c": None, "d": "x y", "-e": 1e-5, "f": {"g": 1}}) == [
        *("--a", "True", "--b", "[1, 2]", "--d", "x y", "-e", "1e-05", "--f", '{"g": 1}'),
    ]
