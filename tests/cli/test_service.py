"""`paceline service`, as a user types it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers import write_tree
from tests.services.conftest import SCRIPT


@pytest.fixture
def services(cli: Any) -> Iterator[Any]:
    """`paceline`, with a script and two models in its working directory; its services end with the test."""
    write_tree(cli.folder, {"score.py": SCRIPT, "two.txt": "2", "three.txt": "3"})
    yield cli
    for service in cli.json("service", "list"):
        cli("service", "delete", service["name"])


@pytest.mark.promise("service-goes-program-ended-called")
def test_service_is_deployed_called_updated_and_deleted_by_the_command_line(services: Any) -> None:
    assert "paceline service deploy NAME" in services("service", "list").stdout
    done = services(
        "service", "deploy", "digits", "--model", "./two.txt", "--entry", "score.py", "--env", "A=1", "--auth"
    )
    uri = done.stdout.strip()
    assert uri.startswith("http://127.0.0.1:")
    assert uri.endswith("/score")
    assert "digits is Healthy, revision 1" in done.stderr
    assert services.json("service", "call", "digits", '{"x": [1]}')["y"] == [2]
    (services.folder / "asked.json").write_text('{"x": [4]}')
    assert '"y": [8.0]' in services("service", "call", "digits", "@asked.json").stdout

    assert services.json("service", "update", "digits", "--model", "./three.txt", "--max-body", "1MB")["revision"] == 2
    assert services.json("service", "call", "digits", '{"x": [1]}')["y"] == [3]
    shown = services.json("service", "show", "digits")
    assert [each["number"] for each in shown["revisions"]] == [1, 2]
    assert shown["revisions"][1]["settings"] == {"max_body_bytes": 1_000_000}
    assert shown["revisions"][1]["variables"] == ["A"]
    assert (shown["state"], shown["models"]) == ("Healthy", ["three.txt"])
    text = services("service", "show", "digits").stdout
    assert "* 2 three.txt score.py" in " ".join(text.split())
    assert services.json("service", "scale", "digits", 2)["workers"] == 2
    assert services.json("service", "rollback", "digits")["revision"] == 1
    assert services.json("service", "reload", "digits")["revision"] == 3
    assert [one["name"] for one in services.json("service", "list")] == ["digits"]
    assert "Healthy" in services("service", "list").stdout

    before = services.json("service", "keys", "digits")
    after = services.json("service", "keys", "digits", "--regenerate", "secondary")
    assert after["primary"] == before["primary"]
    assert after["secondary"] != before["secondary"]
    assert "is served at" in services("service", "logs", "digits").stdout
    assert len(services.json("service", "logs", "digits", "-n", 2)["lines"]) == 2
    unit = services("service", "unit", "digits")
    assert "ExecStart=" in unit.stdout
    assert "systemctl --user enable --now paceline-digits.service" in unit.stderr

    measured = services.json(
        "service", "bench", "digits", '{"x": [1]}', "--clients", "1,2", "--seconds", "0.3", "--picture", "bench.png"
    )
    assert [(each["clients"], each["failures"]) for each in measured] == [(1, 0), (2, 0)]
    assert all(each["requests"] > 0 for each in measured)
    assert (services.folder / "bench.png").read_bytes()[:4] == b"\x89PNG"
    assert "P99 MS" in services("service", "bench", "digits", '{"x": [1]}', "--clients", "1", "--seconds", "0.2").stdout

    follower = services.start("service", "logs", "-f", "digits")
    assert services("service", "stop", "digits").stdout == "digits is stopped\n"
    assert "is stopped" in services("service", "call", "digits", "{}", code=1).stderr
    # `service logs -f` ends when the service is stopped.
    assert "the service ends" in follower.communicate(timeout=180)[0]
    assert services("service", "start", "digits").stdout.strip() == uri
    services("service", "delete", "digits")
    assert services.json("service", "list") == []


def test_failed_service_command_prints_the_reason_and_exits_with_1_or_2(services: Any) -> None:
    write_tree(services.folder, {"bad.py": "import nothing_of_this_name\n"})
    done = services("service", "deploy", "digits", "--model", "./two.txt", "--entry", "bad.py", code=1)
    assert "No module named 'nothing_of_this_name'" in done.stderr
    assert services.json("service", "list")[0]["state"] == "Failed"
    assert "has not been served yet" in services("service", "call", "digits", "{}", code=1).stderr
    services("service", "update", "digits", "--entry", "score.py")
    assert "answered 500" in services("service", "call", "digits", "no JSON", code=1).stderr
    for words, text in (
        (("deploy", "digits", "--model", "./two.txt"), "there is a service 'digits' already"),
        (("deploy", "other"), "a service needs a model"),
        (("deploy", "other", "--model", "none"), "there is no model 'none'"),
        (("deploy", "other", "--model", "./two.txt", "--max-body", "much"), "--max-body: 'much' is not a size"),
        (("deploy", "other", "--model", "./two.txt", "--tls-cert", "a"), "go together"),
        (("deploy", "other", "--model", "./two.txt", "--env", "NOT_THERE"), "Write --env NOT_THERE=VALUE"),
        (("deploy", "other", "--model", "./two.txt", "--environment", "none"), "none"),
        (("deploy", "other", "--model", "./two.txt", "--isolated"), "Name some with --pip"),
        (("update", "digits"), "nothing to update"),
        (("scale", "digits", "0"), "paceline service stop"),
        (("rollback", "digits", "--to", "9"), "no revision 9"),
        (("keys", "digits"), "--auth"),
        (("logs", "digits", "-f", "--json"), "Leave one of them out"),
        (("call", "digits", "@none.json"), "can't be read"),
        (("call", "digits", "score.py"), "Write @score.py to send the file's content"),
        (("bench", "digits", "{}", "--clients", "many"), "such as 1,8,32"),
        (("show", "none"), "There are digits"),
    ):
        assert text in services("service", *words, code=2).stderr, words
