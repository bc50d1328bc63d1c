"""Whom a run tells of its end, as it is written."""

from __future__ import annotations

import pytest

from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.notify import place_of
from tests.helpers import make_job

SECRET = "https://hooks.slack.com/services/T0/B0/abcdef"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("mail:a@b.c", "is not a list of texts"),
        ([3], "is no text"),
        (["slack:SLACK_URL"], "slack:env:VARIABLE"),
        (["teams:keyring:hooks"], "teams:keyring:service/user"),
        (["mail:ann"], "is no address"),
        (["mail:-t@b.c"], "is no address"),
        (["mail:a@b.c\nBcc: d@e.f"], "is no address"),
        (["command:"], "has no command"),
        (["command:'a"], "No closing quotation"),
        (["pager:1"], "'pager' is unknown"),
    ],
    ids=["text", "number", "no place", "half a place", "name", "option", "header", "nothing", "quote", "unknown"],
)
def test_what_has_none_of_the_forms_is_refused_by_its_rule(given: object, rule: str) -> None:
    with pytest.raises(JobError) as error:
        make_job(notify=given)
    assert rule in str(error.value)


@pytest.mark.parametrize("given", [SECRET, f"slack:{SECRET}", f"webhook:{SECRET}"], ids=["bare", "slack", "webhook"])
def test_a_url_is_refused_and_not_shown(given: str) -> None:
    with pytest.raises(JobError) as error:
        make_job(notify=[given])
    assert "slack:env:SLACK_URL" in str(error.value)
    assert "hooks.slack.com" not in str(error.value)


def test_places_are_recorded_and_addresses_never_reach_a_worker() -> None:
    job = make_job(notify=["slack:env:HOOK", "mail:a@b.c"], secrets={"TOKEN": "env:TOKEN"})
    assert Job.from_json(job.to_json()) == job
    assert [place_of(one) for one in job.notify] == ["env:HOOK", None]
    values = {"TOKEN": "t", "notify slack:env:HOOK": SECRET}
    assert dict(job.with_values(values).environment_variables) == {"TOKEN": "t"}
