"""Receivers of a message at a run's end, as a job names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.notify import check_programs, place_of
from tests.helpers import make_job

SECRET = "https://hooks.slack.com/services/T0/B0/abcdef"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("mail:a@b.c", "is not a list of texts"),
        ([3], "is not a text"),
        (["slack:SLACK_URL"], "slack:env:VARIABLE"),
        (["teams:keyring:hooks"], "teams:keyring:service/user"),
        (["mail:ann"], "is not an address"),
        (["mail:-t@b.c"], "is not an address"),
        (["mail:a@b.c\nBcc: d@e.f"], "is not an address"),
        (["apprise:tgram:1/2"], "apprise:env:VARIABLE"),
        (["command:"], "has no command"),
        (["command:'a"], "No closing quotation"),
        (["pager:1"], "'pager' is unknown"),
    ],
    ids=[
        "text",
        "number",
        "no place",
        "half a place",
        "no place of apprise",
        "name",
        "option",
        "header",
        "nothing",
        "quote",
        "unknown",
    ],
)
def test_invalid_notify_value_is_refused_with_the_rule(given: object, rule: str) -> None:
    with pytest.raises(JobError) as error:
        make_job(notify=given)
    assert rule in str(error.value)


@pytest.mark.promise("whoever-wants-know-told-run")
@pytest.mark.parametrize("given", [SECRET, f"slack:{SECRET}", f"webhook:{SECRET}"], ids=["bare", "slack", "webhook"])
def test_notification_url_in_plain_text_is_refused_and_not_shown(given: str) -> None:
    with pytest.raises(JobError) as error:
        make_job(notify=[given])
    assert "slack:env:SLACK_URL" in str(error.value)
    assert "hooks.slack.com" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("end", "is not a list of events"),
        (["faliure"], "Did you mean 'failure'?"),
        (["loss"], "a condition on metrics, such as 'metrics.loss > 10'"),
        ([["end"]], "start, end, failure, hang, quota, best"),
    ],
    ids=["text", "misspelled", "metric", "list"],
)
def test_invalid_notification_event_is_refused_with_a_hint_at_valid_ones(given: object, rule: str) -> None:
    with pytest.raises(JobError) as error:
        make_job(notify=["mail:a@b.c"], notify_on=given)
    assert rule in str(error.value)


def test_job_record_has_references_to_notification_secrets_and_workers_do_not_get_their_values() -> None:
    job = make_job(notify=["slack:env:HOOK", "mail:a@b.c"], notify_on=["failure"], secrets={"TOKEN": "env:TOKEN"})
    assert Job.from_json(job.to_json()) == job
    assert [place_of(one) for one in job.notify] == ["env:HOOK", None]
    values = {"TOKEN": "t", "notify slack:env:HOOK": SECRET}
    assert dict(job.with_values(values).environment_variables) == {"TOKEN": "t"}


def test_notify_command_keeps_its_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    job = make_job(notify=["command:./told.sh 'x y'", "command:mail -s end", "command:/bin/true"])
    assert job.notify == (f"command:'{tmp_path}/a b/told.sh' 'x y'", "command:mail -s end", "command:/bin/true")
    # The supervisor reads the job in another working directory.
    monkeypatch.chdir(tmp_path)
    assert Job.from_json(job.to_json()) == job


def test_missing_notification_command_is_named_before_the_run_starts(tmp_path: Path) -> None:
    program = tmp_path / "told.sh"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(JobError, match=r"told\.sh' is not there, or can't be run \(chmod \+x\)"):
        check_programs([f"command:{program}"], is_here=True)
    program.chmod(0o755)
    check_programs([f"command:{program} --all", "command:sh -c true", "mail:a@b.c"], is_here=True)
    with pytest.raises(JobError, match="'no-such-program' is not a program on the PATH"):
        check_programs(["command:no-such-program"], is_here=True)
    check_programs(["command:no-such-program"], is_here=False)  # another machine may have this program


def test_apprise_notification_is_refused_with_the_pip_install_command_if_apprise_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    check_programs(["ntfy:env:TOPIC"], is_here=True)
    with pytest.raises(JobError, match=r"pip install 'paceline\[notify\]'"):
        check_programs(["mail:a@b.c", "apprise:env:MATRIX"], is_here=False)
