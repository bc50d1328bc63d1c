"""Members of a page: who a visitor is, what each role may change, service accounts, and the log of changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from paceline.errors import UserError
from paceline.runs import states, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.system.files import json_lines, read_json
from paceline.ui.app import make_app
from paceline.ui.config import UiConfig
from paceline.ui.guard import Token
from paceline.ui.members import Accounts, MembersFile
from paceline.ui.visitors import MINE, WRITES, rule_of
from tests.sweeps.made import make_sweep
from tests.sweeps.pictures.trials import SPEC
from tests.ui.conftest import Place, TestClient  # type: ignore[attr-defined]
from tests.ui.streams import opened

#: User ids that belong to no user, so the user's name is the number.
ANN, BOB, VIC, EVE = 61_001, 61_002, 61_003, 61_004
#: The user id of a proxy.
PROXY = 61_009
PAGE = {"accept": "text/html"}


@pytest.fixture
def file(place: Place) -> Path:
    path = place.path.parent / "members"
    path.write_text(f"{ANN} = admin\n'{BOB}' = \"own\"  # a student\n{VIC} = view\n")
    path.chmod(0o644)
    return path


def visit(place: Place, uid: int, **values: Any) -> TestClient:
    """A browser of this user at the socket of a server of its own."""
    config = place.config(**{"socket": "/run/page/socket", "members": str(place.path.parent / "members"), **values})
    return TestClient(make_app(config), base_url="http://127.0.0.1:7223", client=("unix", uid))


def form(place: Place, uid: int, **fields: str) -> dict[str, str]:
    return {"form_key": Token(place.path).form_key(str(uid)), **fields}


def lines(place: Place) -> list[dict[str, str]]:
    return list(json_lines(place.path / "ui" / "members.jsonl"))


# --- Roles of members


def writing_routes(place: Place) -> list[str]:
    app = make_app(place.config())
    return [route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]


@pytest.mark.promise("members-change-only-their-role")
def test_every_writing_route_requires_the_documented_role(place: Place, file: Path) -> None:
    of_ann = place.run("digits_1700000001_00000001", submitted_by=str(ANN))
    of_bob = place.run("digits_1700000002_00000002", submitted_by=str(BOB))
    routes = writing_routes(place)
    assert set(WRITES) <= set(routes)
    assert len(routes) == len(set(routes)) > 20

    clients = {uid: visit(place, uid) for uid in (ANN, BOB, VIC, EVE)}

    def status(uid: int, route: str, folder: RunFolder) -> int:
        path = route.replace("{run_id}", folder.run_id).replace("{name}", "x").replace("{version:int}", "1")
        answer = clients[uid].post(path, data=form(place, uid, action="save"), follow_redirects=False)
        assert answer.status_code != 405, path
        return int(answer.status_code)

    for route in routes:
        rule = WRITES.get(route, "admin")
        assert rule_of(route.replace("{version:int}", "1")) == rule
        assert status(VIC, route, of_bob) == 403, route
        assert status(EVE, route, of_bob) == 403, route
        assert (status(BOB, route, of_ann) == 403) is (rule in (MINE, "admin")), route
    # The refused requests have changed nothing: the log has only BOB, on routes that his role may use.
    assert {(one["member"], one["on"]) for one in lines(place)} <= {
        (str(BOB), on) for on in (of_ann.run_id, "/new", "/views", "/services/x")
    }
    assert of_ann.path.is_dir()
    for route in routes:
        if route != "/runs/{run_id}/delete":
            assert (status(BOB, route, of_bob) == 403) is (WRITES.get(route, "admin") == "admin"), route
            assert status(ANN, route, of_bob) != 403, route


@pytest.mark.promise("members-change-only-their-role")
@pytest.mark.parametrize("end", ["%0A", "%0D", "%00", "%7F"])
def test_path_with_a_control_character_at_its_end_reaches_no_page(place: Place, file: Path, end: str) -> None:
    folder = place.run("digits_1700000001_00000001", submitted_by=str(ANN))
    client, app = visit(place, ANN), make_app(place.config())
    routes = [(route.path, route.methods or set()) for route in app.routes if isinstance(route, Route)]
    assert len(routes) > 60
    for route, methods in routes:
        path = route.replace("{run_id}", folder.run_id).replace("{name}", "x").replace("{version:int}", "1")
        if "{name:any}" not in path:
            method = "POST" if "POST" in methods else "GET"
            answer = client.request(method, path + end, data=form(place, ANN, action="save"), follow_redirects=False)
            assert (answer.status_code, answer.text) == (404, "No page has a control character in its path.\n"), path
    assert lines(place) == []


def test_newline_after_the_path_of_a_route_does_not_lower_its_role() -> None:
    assert {rule_of(f"{path}\n") for path in WRITES} == {"admin"}


def test_member_with_the_role_own_can_cancel_own_runs_but_not_those_of_others(place: Place, file: Path) -> None:
    living = {
        uid: place.run(f"digits_170000000{uid % 10}_00000001", states.RUNNING, submitted_by=str(uid))
        for uid in (ANN, BOB)
    }
    client = visit(place, BOB)
    answer = client.post(f"/runs/{living[ANN].run_id}/cancel", data=form(place, BOB))
    assert answer.status_code == 403
    assert answer.json()["error"] == (
        f"{living[ANN].run_id} is not a run of {BOB}, who has the role own. Ask its owner, or an admin."
    )
    assert not living[ANN].cancel_request.exists()
    assert client.post(f"/runs/{living[BOB].run_id}/cancel", data=form(place, BOB)).status_code == 200
    assert read_json(living[BOB].cancel_request)["by"] == str(BOB)
    refused = visit(place, VIC).post(f"/runs/{living[BOB].run_id}/cancel", data=form(place, VIC))
    assert refused.text == f"{VIC} has the role view, which may not do this. Ask an admin of this page.\n"


def test_member_cannot_change_the_run_of_another_member_by_a_prefix_of_its_id(place: Place, file: Path) -> None:
    place.run("theirs_1700000001_00000001", submitted_by=str(ANN))
    place.run("mine_1700000001_00000001", submitted_by=str(BOB))
    client = visit(place, BOB)
    for name in ("theirs", "theirs_1700000001_0000000", "..%2ftheirs_1700000001_00000001"):
        assert client.post(f"/runs/{name}/archive", data=form(place, BOB)).status_code in (403, 404)
    assert client.post("/runs/mine/archive", data=form(place, BOB)).status_code == 200
    assert [(one["verb"], one["on"]) for one in lines(place)] == [("archive", "mine_1700000001_00000001")]


def test_trial_belongs_to_the_owner_of_its_sweep(place: Place, file: Path) -> None:
    sweep = place.run("tune_1700000001_00000001", submitted_by=str(BOB))
    trial = place.run(f"{sweep.run_id}_1", parent_run_id=sweep.run_id, submitted_by="root")
    # The records of two runs name each other as parent. The parent of a third run does not exist.
    loop = [
        place.run(f"loop_170000000{one}_00000001", parent_run_id=f"loop_170000000{3 - one}_00000001") for one in (1, 2)
    ]
    orphan = place.run("gone_1700000001_00000001_1", parent_run_id="gone_1700000001_00000001", submitted_by=str(BOB))
    client = visit(place, BOB)
    assert client.post(f"/runs/{trial.run_id}/archive", data=form(place, BOB)).status_code == 200
    for folder in (*loop, orphan):
        assert client.post(f"/runs/{folder.run_id}/archive", data=form(place, BOB)).status_code == 403


@pytest.mark.promise("members-change-only-their-role")
def test_bulk_change_of_runs_leaves_out_runs_of_other_members_and_reports_each(place: Place, file: Path) -> None:
    ids = {uid: place.run(f"digits_170000000{uid % 10}_00000001", submitted_by=str(uid)).run_id for uid in (ANN, BOB)}
    client = visit(place, BOB)

    def bulk(action: str, *run_ids: str, **more: str) -> dict[str, Any]:
        body = {**form(place, BOB, action=action, **more), "run": [*run_ids]}
        found: dict[str, Any] = client.post("/actions", data=body).json()
        return found

    for action in ("archive", "tag", "delete", "restore", "cancel"):
        said = bulk(action, ids[ANN], "../etc", "digits", key="k")
        assert (said["done"], len(said["failed"])) == ([], 3), action
        assert "is not a run of" in said["failed"][0]["error"]
    assert lines(place) == []
    assert bulk("delete", ids[ANN], ids[BOB])["done"] == [ids[BOB]]
    trash.delete(place.runs_dir, [RunFolder(place.runs_dir / ids[ANN])])
    page = client.get("/trash", headers=PAGE).text
    assert page.count('<button aria-label="Restore') == 1
    assert bulk("restore", ids[ANN], ids[BOB])["done"] == [ids[BOB]]
    assert [(one["verb"], one["on"]) for one in lines(place)] == [("delete", ids[BOB]), ("restore", ids[BOB])]


def test_only_admins_can_change_saved_views_of_other_members(place: Place, file: Path) -> None:
    bob, ann = visit(place, BOB), visit(place, ANN)
    fields = {"name": "best", "page": "runs", "query": "q=1"}
    assert bob.post("/views", data=form(place, BOB, action="save", **fields)).status_code == 200
    for more in ({"action": "save", "replace": "1"}, {"action": "rename", "new_name": "x"}, {"action": "remove"}):
        assert bob.post("/views", data=form(place, BOB, **{**fields, **more})).status_code == 403
    assert ann.post("/views", data=form(place, ANN, action="remove", name="best")).status_code == 200


def test_forms_that_a_member_may_not_use_are_not_shown(place: Place, file: Path) -> None:
    folder = place.run(submitted_by=str(BOB), git=None)
    sweep = make_sweep(place.runs_dir, SPEC)
    pages = {uid: visit(place, uid).get(f"/runs/{folder.run_id}", headers=PAGE).text for uid in (ANN, BOB, VIC)}
    assert [("/delete" in text, "/archive" in text) for text in pages.values()] == [(True, True)] * 2 + [(False, False)]
    assert '<form method="post"' not in pages[VIC]
    assert ['id="share"' in text for text in pages.values()] == [True, False, False]
    assert ['members">Members</a>' in text for text in pages.values()] == [True, False, False]
    others = visit(place, BOB).get(f"/runs/{sweep.run_id}/sweep", headers=PAGE).text
    assert ("/again" in others, "/more" in others, "/archive" in others) == (True, False, False)
    lists = {uid: visit(place, uid).get("/", headers=PAGE).text for uid in (ANN, BOB, VIC)}
    assert ['id="bulk"' in text for text in lists.values()] == [True, True, False]
    for path in ("/new", f"/runs/{folder.run_id}/rerun"):
        assert visit(place, VIC).get(path).status_code == 403
    assert visit(place, BOB).get("/new").status_code == 200


def test_csrf_token_of_another_member_is_refused(place: Place, file: Path) -> None:
    folder = place.run(submitted_by=str(BOB))
    address = f"/runs/{folder.run_id}/archive"
    for key in (Token(place.path).form_key(str(ANN)), Token(place.path).form_key(), ""):
        assert visit(place, BOB).post(address, data={"form_key": key}).status_code == 403
    foreign = {"origin": "http://evil.example"}
    assert visit(place, BOB).post(address, data=form(place, BOB), headers=foreign).status_code == 403
    assert lines(place) == []


# --- The identity of the visitor


def test_non_member_sees_no_page_unless_the_members_file_has_a_star_entry(place: Place, file: Path) -> None:
    folder = place.run(display_name="secret name")
    for path in ("/", "/live", f"/runs/{folder.run_id}", "/members"):
        answer = visit(place, EVE).get(path)
        assert (answer.status_code, "secret name" in answer.text) == (403, False)
        assert answer.text == f"{EVE} is not a member of this page. Ask its owner.\n"
    file.write_text(f"{file.read_text()}* = view\n")
    assert "secret name" in visit(place, EVE).get("/").text
    assert visit(place, EVE).post(f"/runs/{folder.run_id}/archive", data=form(place, EVE)).status_code == 403


@pytest.mark.promise("kernel-names-members-of-page")
def test_cookie_token_or_header_can_not_change_the_user_name(place: Place, file: Path) -> None:
    token = Token(place.path)
    for client in (visit(place, EVE), visit(place, VIC, user_header="X-Forwarded-User", proxy_user=str(PROXY))):
        client.cookies.set(token.cookie, token.cookie_value)
        forged = {"x-forwarded-user": str(ANN), "remote-user": str(ANN), "x-forwarded-for": "127.0.0.1"}
        assert client.get(f"/?token={token.text}", headers=forged).status_code == 403
    # The kernel does not report the user of this connection.
    config = place.config(socket="/run/page/socket", members=str(file))
    client = TestClient(make_app(config), base_url="http://127.0.0.1:7223", client=("127.0.0.1", ANN))
    assert client.get("/").status_code == 401


def test_user_name_is_taken_from_the_configured_header_of_the_proxy(place: Place, file: Path) -> None:
    file.write_text("ann@example.org = own\n* = view\n")
    client = visit(place, PROXY, user_header="X-Forwarded-User", proxy_user=str(PROXY))
    page = client.get("/", headers={"X-Forwarded-User": "ann@example.org"})
    assert (page.status_code, "ann@example.org" in page.text, 'id="bulk"' in page.text) == (200, True, True)
    assert 'id="bulk"' not in client.get("/", headers={"X-Forwarded-User": "other"}).text
    twice = [("X-Forwarded-User", "ann@example.org"), ("x-forwarded-user", "other")]
    for headers in ({}, {"X-Forwarded-User": ""}, {"X-Forwarded-User": "*"}, {"X-Forwarded-User": "a b"}, twice):
        assert client.get("/", headers=headers).status_code == 401
    assert client.get("/", headers={"X-Forwarded-User": "a" * 100_000}).status_code == 401
    # Only the configured header sets the user's name, whatever other headers say.
    assert (
        client.get("/", headers={"X-Forwarded-User": "other", "X_Forwarded_User": "ann@example.org"}).status_code == 200
    )
    assert visit(place, ANN, user_header="X-Forwarded-User", proxy_user=str(PROXY)).get("/").status_code == 403


def test_owner_of_the_server_is_admin(place: Place, file: Path) -> None:
    folder = place.run()
    mine = visit(place, os.geteuid()).get(f"/runs/{folder.run_id}", headers=PAGE).text
    token, client = Token(place.path), visit(place, EVE, socket=None)
    assert client.get("/").status_code == 401
    assert client.get(f"/?token={token.text}").status_code == 200
    at_port = client.get(f"/runs/{folder.run_id}", headers=PAGE).text
    assert "/delete" in mine
    assert "/delete" in at_port


@pytest.mark.parametrize(
    "values",
    [
        {"user_header": "X-User"},
        {"user_header": "X-User", "members": "m"},
        {"user_header": "X-User", "socket": "s"},
        {"user_header": "X User", "members": "m", "socket": "s"},
        {"proxy_user": "root"},
        {"user_header": "X-User", "members": "m", "socket": "s", "proxy_user": "no-such-user"},
    ],
)
def test_contradictory_options_of_members_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"--(user-header|proxy-user) "):
        UiConfig(workspace="w", **values)  # type: ignore[arg-type]


# --- The members file


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("ann = admin\nbob = boss\n", 2, "a role is view, own or admin"),
        ("ann = admin\n\n# x\nann = view\n", 4, "'ann' has a role already"),
        ("ann\n", 1, "NAME = ROLE"),
        ("a b = own\n", 1, "NAME = ROLE"),
        ("ann/x = own\n", 1, "A name has letters"),
        ('"ann = own\n', 1, "NAME = ROLE"),
        ("ann = own admin\n", 1, "NAME = ROLE"),
        ("[members]\n", 1, "NAME = ROLE"),
    ],
)
def test_wrong_line_of_the_members_file_is_named(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "members"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UserError, match=f"line {line}: .*{said}"):
        MembersFile(path)


def test_members_file_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "members"
    path.write_text("ann = admin\n")
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(UserError, match="other users can write to it"):
            MembersFile(path)
    path.chmod(0o600)
    assert MembersFile(path).role("ann") == "admin"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(UserError, match="is a link"):
        MembersFile(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "none", "."):
        with pytest.raises(UserError, match="--members"):
            MembersFile(tmp_path / name)
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="everybody can replace it"):
        MembersFile(path)
    if os.geteuid() == 0:
        tmp_path.chmod(0o755)
        os.chown(path, EVE, EVE)
        with pytest.raises(UserError, match="belongs to another user"):
            MembersFile(path)


def test_change_of_the_members_file_applies_at_the_next_request(place: Place, file: Path) -> None:
    client = visit(place, BOB)
    assert 'id="bulk"' in client.get("/").text
    file.write_text(f"{BOB} = view\n")
    assert 'id="bulk"' not in client.get("/").text
    assert client.post("/new", data=form(place, BOB)).status_code == 403
    file.write_text("")
    assert client.get("/").status_code == 403


def test_broken_members_file_refuses_all_members_until_it_is_corrected(
    place: Place, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, text = visit(place, ANN), file.read_text()
    file.write_text("secret line\n")
    for _ in range(2):
        answer = client.get("/")
        assert (answer.status_code, "secret" in answer.text) == (503, False)
    assert capsys.readouterr().err.count("line 1: 'secret line' must be NAME = ROLE") == 1
    file.write_text(text)
    file.chmod(0o666)
    assert client.get("/").status_code == 503
    file.chmod(0o600)
    assert client.get("/").status_code == 200


def test_live_stream_of_an_open_page_ends_when_its_member_is_removed_from_the_members_file(
    place: Place, file: Path
) -> None:
    app = make_app(place.config(socket="/run/page/socket", members=str(file)))

    async def by_bob(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": ("unix", BOB)}, receive, send)

    async def watch() -> None:
        place.run("digits_1700000001_00000001")
        async with opened(by_bob, "", "/live") as watcher:  # type: ignore[arg-type]
            await watcher.until(lambda event, _: event == "rows")
            file.write_text(f"{ANN} = admin\n")
            place.run("digits_1700000002_00000001")
            with pytest.raises(AssertionError, match="the stream has ended"):
                await watcher.until(lambda event, _: event == "never")

    asyncio.run(watch())


# --- Service accounts


@pytest.mark.promise("account-tokens-expire")
def test_service_account_acts_with_its_role_until_it_expires(place: Place, file: Path, monkeypatch: Any) -> None:
    accounts = Accounts(place.path)
    account, token = accounts.add("nightly", "own", 86400)
    stored = (place.path / "ui" / "accounts" / "nightly.json").read_text()
    assert token.partition(".")[2] not in stored
    for path in ("ui", "ui/accounts", "ui/accounts/nightly.json"):
        assert (place.path / path).stat().st_mode & 0o077 == 0
    mine = place.run("a_1700000001_00000001", submitted_by="token:nightly")
    theirs = place.run("a_1700000002_00000002", submitted_by="nightly")
    for client in (visit(place, EVE), visit(place, EVE, socket=None)):
        client.headers["authorization"] = f"Bearer {token}"
        assert client.get("/").status_code == 200
        assert client.post(f"/runs/{mine.run_id}/archive", data={"x": ""}).status_code == 200
        assert client.post(f"/runs/{theirs.run_id}/archive", data={"x": ""}).status_code == 403
        assert client.get("/members").status_code == 403
        for wrong in (f"{token}x", token[:-1], "paceline_", "paceline_../token.x", f"paceline_.{'x' * 50_000}"):
            assert client.get("/", headers={"authorization": f"bearer {wrong}"}).status_code == 401
    # A bearer token of another system is ignored.
    assert visit(place, VIC).get("/", headers={"authorization": "Bearer eyJhbGciOi"}).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr("paceline.ui.members.time.time", lambda: account.expires + 1)
        answer = client.get("/")
        assert (answer.status_code, answer.text) == (
            401,
            "The token of nightly has expired. Ask an admin for a new one.\n",
        )
    with pytest.raises(UserError, match="account remove nightly"):
        accounts.add("nightly", "view", 1)
    accounts.remove("nightly")
    assert client.get("/").status_code == 401
    with pytest.raises(UserError, match="no account 'nightly'"):
        accounts.remove("nightly")
    assert [(one["member"], one["origin"]) for one in lines(place)] == [("token:nightly", "token")] * 2


@pytest.mark.parametrize(
    ("name", "role", "valid_s"),
    [("../x", "own", 1), ("", "own", 1), ("A", "own", 1), ("a", "boss", 1), ("a", "own", 0), ("a", "own", 1e9)],
)
def test_service_account_with_an_invalid_name_role_or_lifetime_is_refused(
    tmp_path: Path, name: str, role: str, valid_s: float
) -> None:
    with pytest.raises(UserError):
        Accounts(tmp_path).add(name, role, valid_s)
    assert list(tmp_path.iterdir()) == []


def test_account_file_that_others_could_have_written_is_refused(place: Place, file: Path) -> None:
    _, token = Accounts(place.path).add("nightly", "own", 86400)
    path = place.path / "ui" / "accounts" / "nightly.json"
    path.chmod(0o622)
    assert Accounts(place.path).find(token) is None
    path.chmod(0o600)
    for text in ("", "[]", "{}", '{"name": 1}', json.dumps({**json.loads(path.read_text()), "role": "boss"})):
        path.write_text(text)
        assert Accounts(place.path).find(token) is None


# --- The log of changes


@pytest.mark.promise("members-change-only-their-role")
def test_audit_log_has_a_line_for_each_change_and_is_visible_to_admins(place: Place, file: Path) -> None:
    folder = place.run(submitted_by=str(BOB))
    client = visit(place, BOB)
    client.post(f"/runs/{folder.run_id}/rename", data=form(place, BOB, name="<b>best\n"))
    client.post(f"/runs/{folder.run_id}/tag", data=form(place, BOB, key="k"))
    (first, second) = lines(place)
    assert re.fullmatch(r"20\d\d-.*Z", first.pop("time_utc"))
    assert first == {"member": str(BOB), "role": "own", "verb": "rename", "on": folder.run_id, "origin": "socket"}
    assert second["verb"] == "tag"
    page = visit(place, ANN).get("/members", headers=PAGE).text
    assert page.index("<td>tag</td>") < page.index("<td>rename</td>")
    assert client.get("/members").status_code == 403
    assert place.client().get("/members").status_code == 404


def test_audit_log_has_whole_lines_when_two_servers_write_concurrently(place: Place, file: Path) -> None:
    folder = place.run(submitted_by=str(BOB))
    clients = [visit(place, BOB), visit(place, ANN)]
    keys = [form(place, uid) for uid in (BOB, ANN)]

    def tag(number: int) -> int:
        at = number % 2
        address = f"/runs/{folder.run_id}/tag"
        answer = clients[at].post(address, data={**keys[at], "key": f"k{number}"}, follow_redirects=False)
        return int(answer.status_code)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(tag, range(60))) == {303}
    text = (place.path / "ui" / "members.jsonl").read_text()
    assert len([json.loads(line) for line in text.splitlines()]) == 60


def test_change_is_refused_if_the_audit_log_cannot_be_written(place: Place, file: Path) -> None:
    folder = place.run(submitted_by=str(BOB))
    (place.path / "ui" / "members.jsonl").mkdir(parents=True)
    answer = visit(place, BOB).post(f"/runs/{folder.run_id}/tag", data=form(place, BOB, key="k"))
    assert answer.status_code == 503
    assert "nothing was changed" in answer.json()["error"]
    assert tags_and_properties.read(folder.notes).tags == {}


def test_run_started_on_the_page_is_recorded_under_the_member(place: Place, file: Path, monkeypatch: Any) -> None:
    from paceline.runs.record import user_name
    from paceline.ui.views import actions

    folder, names = place.run(submitted_by=str(ANN)), []
    monkeypatch.setattr(actions, "rerun", lambda folder, workspace_dir: names.append(user_name()))
    body = form(place, BOB, action="rerun", run=folder.run_id)
    assert visit(place, BOB).post("/actions", data=body).json()["done"] == [folder.run_id]
    assert names == [str(BOB)]
    assert user_name() != str(BOB)


def test_comment_can_be_removed_only_by_its_author_or_an_admin(place: Place, file: Path) -> None:
    folder = place.run(submitted_by=str(ANN))
    clients = {uid: visit(place, uid) for uid in (ANN, BOB, VIC)}

    def change(uid: int, verb: str, **fields: str) -> int:
        address = f"/runs/{folder.run_id}/{verb}"
        return int(clients[uid].post(address, data=form(place, uid, **fields), follow_redirects=False).status_code)

    assert [change(uid, "comment", text=f"from {uid}") for uid in (ANN, BOB, VIC)] == [303, 303, 403]
    of_ann, of_bob = tags_and_properties.read(folder.notes).comments.values()
    assert [of_ann.author, of_bob.author] == [str(ANN), str(BOB)]
    pages = {uid: clients[uid].get(f"/runs/{folder.run_id}", headers=PAGE).text for uid in clients}
    assert all(f"from {uid}" in page for page in pages.values() for uid in (ANN, BOB))
    assert [pages[uid].count("Remove the comment of") for uid in (ANN, BOB, VIC)] == [2, 1, 0]
    assert [change(uid, "uncomment", comment=of_ann.id) for uid in (BOB, VIC)] == [403, 403]
    assert len(tags_and_properties.read(folder.notes).comments) == 2
    assert change(BOB, "uncomment", comment=of_bob.id) == 303
    change(BOB, "comment", text="again")
    *_, again = tags_and_properties.read(folder.notes).comments
    assert change(ANN, "uncomment", comment=again) == 303
    assert [*tags_and_properties.read(folder.notes).comments] == [of_ann.id]
    verbs = [(line["member"], line["verb"]) for line in lines(place)]
    assert verbs == [
        (str(uid), verb)
        for uid, verb in ((ANN, "comment"), (BOB, "comment"), (BOB, "uncomment"), (BOB, "comment"), (ANN, "uncomment"))
    ]
