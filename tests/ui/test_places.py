"""The pages of models, services and compute targets: their content, and the changes that their forms make."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ServiceFailedError
from paceline.models.model import Model
from paceline.runs import states
from paceline.services import store
from paceline.services.folder import ServiceFolder
from paceline.services.record import HEALTHY, STOPPED, DesiredState, Revision, RevisionModel, ServiceRecord
from paceline.services.service import Service
from paceline.system.files import write_json
from paceline.targets import polling
from paceline.targets.status import NodeStatus, Status, UserUse, uses
from paceline.targets.status_of_all import TargetLook
from paceline.ui.guard import Token
from paceline.ui.views import places
from paceline.ui.views.places import TargetWatch
from paceline.workspace import Workspace
from tests.helpers import make_job, wait_until
from tests.ui.conftest import HOSTILE, Place, log_values
from tests.ui.test_app import PAGE, Elements


@pytest.fixture
def two(place: Place) -> list[Model]:
    """Two versions of a model, of two runs."""
    made = []
    for number, rate in ((1, "0.1"), (2, "0.2")):
        folder = place.run(f"digits_170000000{number}_0000000{number}", job=make_job(arguments=("--lr", rate)))
        log_values(folder, "accuracy", [0.5, 0.5 + number / 10])
        (folder.outputs / "weights.txt").write_text("w" * number)
        run = Workspace(place.path).get_run(folder.run_id)
        made.append(run.register_model("digits", "outputs/weights.txt"))
    return made


def form(place: Place, **fields: str) -> dict[str, str]:
    return {"form_key": Token(place.path).form_key(), **fields}


def add_service(place: Place, name: str = "digits", model: str = "digits:1", **values: Any) -> ServiceFolder:
    """A service at rest, without processes."""
    folder = ServiceFolder(store.services_dir(place.path) / name)
    for number in (1, 2):
        folder.revision(number).path.mkdir(parents=True)
        models = (RevisionModel(id=model, name="digits", version="1"),)
        revision = Revision(number=number, models=models, created_by="ada", why="deployed")
        write_json(folder.revision(number).description, revision.to_json())
    folder.log.parent.mkdir(parents=True)
    record = ServiceRecord(
        **{"name": name, "state": STOPPED, "revision": 2, "served": (1, 2), "workers": 1, "settled": 1, **values}
    )
    write_json(folder.record, record.to_json())
    write_json(folder.wanted, DesiredState(state="stopped", revision=2).to_json())
    return folder


def test_model_list_shows_metrics_of_the_training_run_and_services_of_each_version(
    place: Place, two: list[Model]
) -> None:
    add_service(place)
    text = place.client().get("/models").text
    assert "accuracy <b>0.6</b>" in text
    assert '<a href="./services/digits">digits</a>' in text
    assert '<a href="./models/digits">digits: 2 versions side by side</a>' in text


def test_model_page_compares_versions_side_by_side_and_marks_parameters_that_differ(
    place: Place, two: list[Model]
) -> None:
    client = place.client()
    text = client.get("/models/digits").text
    row = '<tr class="differs"><th scope="row">--lr</th><td>0.2</td><td>0.1</td></tr>'
    assert row in text
    assert f"compare?run={two[1].run_id}&amp;run={two[0].run_id}" in text
    alone = client.get("/models/digits?version=1").text
    assert 'id="only-different"' not in alone
    assert "<td>0.1</td>" in alone
    for wrong, code in (("version=x", 400), ("version=9", 404), ("&".join(f"version={n}" for n in range(1, 11)), 400)):
        assert client.get(f"/models/digits?{wrong}").status_code == code, wrong
    assert client.get("/models/none").status_code == 404


def test_model_version_page_shows_tables_instead_of_json(place: Place, two: list[Model]) -> None:
    text = place.client().get("/models/digits/1").text
    for words in ("Metrics of the run", "<dt>--lr</dt><dd>0.1</dd>", "All versions, side by side", "<h2>Topology</h2>"):
        assert words in text
    for key in ("topology", "arguments", '"entry"', "{&#34;"):
        assert key not in text


def test_forms_of_the_model_page_change_aliases_tags_and_description_of_a_version(
    place: Place, two: list[Model]
) -> None:
    client, model = place.client(), two[0]
    answer = client.post("/models/digits/1/alias", data=form(place, alias="production"), follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "../1")
    assert model.aliases == ["production"]
    client.post("/models/digits/1/tag", data=form(place, key=HOSTILE, value=HOSTILE))
    client.post("/models/digits/1/describe", data=form(place, description=f"**good**\r\n{HOSTILE}"))
    assert model.tags == {HOSTILE: HOSTILE}
    assert model.description == f"**good**\n{HOSTILE}"
    for path in ("/models", "/models/digits", "/models/digits/1"):
        page = Elements(client.get(path, headers=PAGE).text)
        assert page.runs == [], path
    assert "<strong>good</strong>\n&lt;script&gt;" in client.get("/models/digits/1").text
    client.post("/models/digits/1/alias", data=form(place, remove="production"))
    client.post("/models/digits/1/tag", data=form(place, remove=HOSTILE))
    client.post("/models/digits/1/describe", data=form(place, description=""))
    assert (model.aliases, model.tags, model.description) == ([], {}, "")


@pytest.mark.parametrize(
    ("action", "fields", "words"),
    [
        ("alias", {"alias": "v3"}, "v3"),
        ("alias", {"remove": "none"}, "has no alias 'none'"),
        ("tag", {"key": "k" * 501}, "at most 500 characters"),
        ("describe", {"description": "d" * 50_001}, "at most 50000 characters, got 50001"),
        ("deploy", {"service": "A b"}, "the service name 'A b'"),
        ("deploy", {"service": "digits", "port": "80x"}, "port must be a whole number, got '80x'"),
        ("deploy", {"service": "digits", "workers": "5000"}, "1 to 1024"),
        ("deploy", {"service": "digits", "target": "moon"}, "moon"),
        ("serve", {"service": "none"}, "there is no service 'none'"),
    ],
)
def test_invalid_model_form_returns_an_error_and_changes_nothing(
    place: Place, two: list[Model], action: str, fields: dict[str, str], words: str
) -> None:
    answer = place.client().post(f"/models/digits/1/{action}", data=form(place, **fields))
    assert answer.status_code in (400, 404, 409)
    assert words in answer.json()["error"]
    assert (two[0].aliases, two[0].tags, two[0].description) == ([], {}, None)
    assert store.all_folders(place.path) == []


def test_model_version_is_deleted_only_if_no_service_uses_it_and_no_alias_names_it(
    place: Place, two: list[Model]
) -> None:
    add_service(place)
    client = place.client()
    two[1].set_alias("production")
    for number, words in ((1, "is served by 'digits'"), (2, "is 'production'")):
        assert "/delete" not in client.get(f"/models/digits/{number}").text
        answer = client.post(f"/models/digits/{number}/delete", data=form(place))
        assert words in answer.json()["error"]
    two[1].remove_alias("production")
    assert "/delete" in client.get("/models/digits/2").text
    answer = client.post("/models/digits/2/delete", data=form(place), follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "../../../models")
    assert [model.version for model in Model.list(Workspace(place.path))] == [1]


def test_forms_deploy_a_version_and_let_a_service_serve_it(
    place: Place, two: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(Model, "deploy", lambda model, _, name, **options: asked.append((model.id, name, options)))
    monkeypatch.setattr(
        Service, "update", lambda service, models, **options: asked.append((service.name, models, options))
    )
    add_service(place, "words")
    client = place.client()
    fields = {"service": "digits", "target": "local", "port": "8080", "workers": "2", "auth": "1"}
    answer = client.post("/models/digits/1/deploy", data=form(place, **fields), follow_redirects=False)
    assert answer.headers["location"] == "../../../services/digits"
    client.post("/models/digits/2/serve", data=form(place, service="words"), follow_redirects=False)
    assert asked == [
        ("digits:1", "digits", {"target": "local", "port": 8080, "workers": 2, "auth": True}),
        ("words", "digits:2", {"wait": False}),
    ]


def test_invalid_model_lineage_is_reported_only_on_the_page_of_its_version(place: Place, two: list[Model]) -> None:
    path = place.path / "models" / "digits" / "1" / "model.json"
    data = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_text(json.dumps(data | {"run": data["run"] | {"arguments": 7}}))
    client = place.client()
    assert "has a lineage that can&#39;t be read" in client.get("/models/digits/1").text
    assert client.get("/models").text.count("digits:") == 3
    path.write_text(json.dumps(data | {"run": [1]}))
    assert client.get("/models/digits/1").status_code == 404
    assert "digits:2" in client.get("/models").text


def test_page_of_a_service_shows_versions_traffic_and_forms(place: Place) -> None:
    folder = add_service(place, failure=HOSTILE)
    folder.log.write_text(f"{HOSTILE}\nready\n")
    client = place.client()
    text = client.get("/services/digits", headers=PAGE).text
    assert Elements(text).runs == []
    assert 'action="../services/digits/start"' in text
    assert "none now" in text
    assert 'action="../services/digits/rollback"' in text
    assert '<a href="../models/digits/1">digits:1</a>' in text
    assert "No process runs." in text
    assert client.get("/services/digits/load").json() == {
        "points": [],
        "error": "service 'digits' is Stopped and has no address yet.",
    }
    assert ' action="' not in place.client(read_only=True).get("/services/digits").text


def test_service_forms_call_the_same_functions_as_the_command_line(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    for name in ("stop", "start", "reload", "scale", "rollback"):

        def ask(service: Service, *values: object, name: str = name, **options: object) -> None:
            asked.append((name, service.name, *values, options))

        monkeypatch.setattr(Service, name, ask)
    add_service(place)
    client = place.client()
    for verb, fields in (
        ("stop", {}),
        ("start", {}),
        ("reload", {}),
        ("scale", {"workers": "3"}),
        ("rollback", {"revision": "1"}),
    ):
        answer = client.post(f"/services/digits/{verb}", data=form(place, **fields), follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "../digits")
    no_wait = {"wait": False}
    assert asked == [
        ("stop", "digits", no_wait),
        ("start", "digits", no_wait),
        ("reload", "digits", no_wait),
        ("scale", "digits", 3, no_wait),
        ("rollback", "digits", 1, no_wait),
    ]
    assert client.post("/services/digits/scale", data=form(place, workers="-1")).status_code == 400
    assert client.post("/services/none/stop", data=form(place)).status_code == 404


def test_service_call_on_the_page_shows_answers_and_errors_but_not_the_service_key(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_service(place)
    write_json(folder.keys, {"primary": "secret-key-1", "secondary": "secret-key-2"})
    answers: list[Callable[[], object]] = [lambda: {"sum": 3}, lambda: HOSTILE, lambda: b"\xff"]
    sent: list[object] = []

    def run(service: Service, data: bytes, timeout_s: float) -> object:
        sent.append(data)
        return answers.pop(0)()

    monkeypatch.setattr(Service, "run", run)
    client = place.client()

    def call() -> dict[str, str]:
        answer = client.post("/services/digits/call", data=form(place, data="[1, ü]"))
        assert "secret-key" not in answer.text
        found: dict[str, str] = answer.json()
        return found

    assert call()["answer"] == '{\n  "sum": 3\n}'
    assert "\x1b" not in call()["answer"]
    assert call()["answer"] == "1 bytes, which are not text"
    assert sent[0] == "[1, ü]".encode()

    def refuse() -> object:
        raise ServiceFailedError("http://127.0.0.1/score answered 400: a must be positive", 400)

    answers.append(refuse)
    assert call() == {"error": "http://127.0.0.1/score answered 400: a must be positive"}


def test_read_only_server_refuses_every_form_of_models_and_services(place: Place, two: list[Model]) -> None:
    add_service(place)
    client = place.client(read_only=True)
    paths = [f"/models/digits/2/{verb}" for verb in ("alias", "tag", "describe", "delete", "deploy", "serve")]
    paths += [f"/services/digits/{verb}" for verb in ("stop", "start", "reload", "scale", "rollback", "call")]
    for path in paths:
        assert client.post(path, data=form(place)).status_code == 403, path
        assert place.client().post(path, data={"form_key": "a.b"}).status_code == 403, path
    for path in ("/models/digits/1", "/services/digits"):
        assert '<form method="post"' not in client.get(path).text
    assert len(Model.list(Workspace(place.path))) == 2


def compute(place: Place, client: Any) -> str:
    """The live piece of the page of targets."""
    from starlette.requests import Request

    from paceline.ui import render

    scope = {"type": "http", "path": "/live/compute", "headers": [], "app": client.app, "query_string": b""}
    request = Request(scope)
    return render.text(request, "compute_part.html", **places.targets(request))


def test_target_without_an_answer_does_not_delay_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    answering = threading.Event()

    def look(_: Path, names: list[str], limit_s: float) -> list[TargetLook]:
        if names == ["dead"]:
            answering.wait(300)
            return [TargetLook(name="dead", kind="ssh", error="no answer in 5 s")]
        return [TargetLook(name=names[0], kind="local", status=Status(nodes=(NodeStatus(name="vm", cores=2),)))]

    monkeypatch.setattr(places, "look_at_all", look)
    monkeypatch.setattr(places.configured, "names", lambda _: ["local", "dead"])
    client = place.client()
    watch: TargetWatch = client.app.state.targets  # type: ignore[attr-defined]
    try:
        wait_until(lambda: watch.seen()[0].look is not None, "the status of the target")
        text = compute(place, client)
        assert "asked, no answer yet" in text
        assert ">vm<" in text
    finally:
        answering.set()
    wait_until(lambda: watch.seen()[1].look is not None, "the status of the target")
    text = compute(place, client)
    assert "no answer in 5 s" in text
    assert "No status since" in text
    assert "paceline compute doctor dead" in text


def test_compute_page_shows_runs_users_queue_and_unreachable_hosts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = place.run("digits_1700000000_00000009", states.RUNNING, target="local")
    tickets = [
        {"run_id": own.run_id, "user": "ada", "cores": 4, "granted": {"gpus": ["0", "1"]}, "gpu_count": 2},
        {"run_id": HOSTILE, "user": HOSTILE, "cores": 8, "granted": None, "gpu_count": 1},
        {"run_id": "last", "user": "bob", "cores": 8, "granted": None, "gpu_count": "x"},
    ]
    share = UserUse(user="ada", group=HOSTILE, share=2.0, used_hours=41.25)
    shared = NodeStatus(name="vm", cores=8, outside=(HOSTILE, "GPU 3: used by x"), shared_by="carol", shares=(share,))
    nodes = (shared, NodeStatus(name="gone", is_up=False, state="down", message=HOSTILE))
    status = Status(nodes=nodes, jobs=tuple(uses("vm", tickets)))
    looks = [TargetLook(name="local", kind="local", status=status)]
    monkeypatch.setattr(places, "look_at_all", lambda *_: looks)
    polling.keep(
        polling.doctor_path(place.path, "local"),
        {
            "time_utc": "2026-11-28T10:00:00Z",
            "result": "fail",
            "findings": [{"level": "fail", "check": "lo", "node": "vm", "seen": HOSTILE}, 7],
        },
    )
    client = place.client()
    watch: TargetWatch = client.app.state.targets  # type: ignore[attr-defined]
    wait_until(lambda: watch.seen()[0].look is not None, "the status of the target")
    text = compute(place, client)
    assert Elements(text).runs == []
    for words in (
        f'<a href="../runs/{own.run_id}">{own.run_id}</a></td><td>ada</td>',
        "0, 1",
        "free cores or GPUs, first in the queue",
        "1 run before it in the queue",
        "<td>normal</td>",
        "GPU 3: used by x",
        "The shares file belongs to carol.",
        '<td class="num">2</td><td class="num">41.2</td>',
        "seen down since",
        "<b>fail</b> lo on vm:",
    ):
        assert words in text
    since = watch.seen()[0].down_since["gone"]
    monkeypatch.setattr(places, "_PAUSE_S", 0.0)
    watch._look("local")
    assert watch.seen()[0].down_since["gone"] == since


def test_empty_model_service_and_compute_pages_show_the_next_command(place: Place) -> None:
    client = place.client()
    assert "paceline model register NAME" in client.get("/models").text
    assert "paceline service deploy NAME" in client.get("/services").text
    watch: TargetWatch = client.app.state.targets  # type: ignore[attr-defined]
    wait_until(lambda: watch.seen()[0].look is not None, "the status of the target")
    assert "paceline submit --compute local" in compute(place, client)


def test_page_of_a_service_recorded_as_healthy_loads_even_if_the_service_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_service(place, state=HEALTHY, port=1)
    monkeypatch.setattr(store, "record", lambda _: store.stored(folder))
    client = place.client()
    text = client.get("/services/digits").text
    assert "100 %" in text
    assert 'action="../services/digits/scale"' in text
    assert "refused" in client.get("/services/digits/load").json()["error"]
