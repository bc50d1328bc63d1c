"""Cancel, tag, rename and rerun from a page: by the command line's functions, and only by forms of the page."""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.stacks import RunStacks
from paceline.runs import states, store, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.system.files import json_lines, read_json
from paceline.ui.guard import Token
from paceline.ui.views import actions, common, run, start
from tests.helpers import wait_until
from tests.observe.test_wait_graph import entry, rank, told
from tests.ui.conftest import HOSTILE, Place, log_values, say


def key_of(place: Place, folder: RunFolder) -> str:
    """Return the key in the forms of the run's page."""
    found = re.search(r'name="form_key" value="([^"]+)"', place.client().get(f"/runs/{folder.run_id}").text)
    assert found
    return found[1]


@pytest.mark.promise("cancel-rerun-tags-go-command")
def test_cancel_form_records_the_user_and_is_not_shown_again(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client()
    form = {"form_key": key_of(place, folder)}
    answer = client.post(f"/runs/{folder.run_id}/cancel", data=form, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, f"../{folder.run_id}")
    assert read_json(folder.cancel_request)["by"]
    text = client.get(f"/runs/{folder.run_id}").text
    assert "CancelRequested" in text
    assert "/cancel" not in text


def test_a_run_that_has_ended_is_not_canceled(place: Place) -> None:
    folder = place.run()
    form = {"form_key": Token(place.path).form_key()}
    answer = place.client().post(f"/runs/{folder.run_id}/cancel", data=form)
    assert answer.status_code == 409
    assert "is Completed already" in answer.json()["error"]
    assert not folder.cancel_request.exists()


@pytest.mark.promise("hang-told-shown-page-button")
def test_page_of_a_hanging_run_shows_the_reason_the_blocked_ranks_and_a_stacks_button(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = {
        "since_utc": "2026-11-23T06:12:03.000Z",
        "text": "Rank 0 waits for <rank 1>.",
        "report": "attempts/1/hang.txt",
    }
    folder = place.run(status=states.RUNNING)
    store.write(folder, dataclasses.replace(store.stored(folder), hang=hang))
    report = folder.hang_report(len(store.stored(folder).attempts))
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("rank 1: train.py, line 7\n")
    client = place.client()
    text = client.get(f"/runs/{folder.run_id}").text
    for words in (
        "Hangs since <time",
        "</span> Hangs</span>",
        "waits for &lt;rank 1&gt;.",
        "rank 1: train.py, line 7",
    ):
        assert words in text
    assert "hangs since 2026-11-23" in client.get("/").text
    assert "<title>! Hangs: " in text
    assert "icon-bad.svg" in text
    look = told(rank(at="<train>\x1b[2J.py:20 step"), rank(entry("allreduce")))
    monkeypatch.setattr(run, "take", lambda folder: RunStacks(look))  # type: ignore[arg-type]
    form = {"form_key": key_of(place, folder)}
    answer = client.post(f"/runs/{folder.run_id}/stacks", data=form)
    assert answer.status_code == 200
    assert "&lt;train&gt;\\x1b[2J.py:20" in answer.text
    assert "<train>" not in answer.text
    assert client.post(f"/runs/{folder.run_id}/stacks", data={}).status_code in (403, 415)


@pytest.mark.promise("cancel-rerun-tags-go-command")
def test_tags_of_a_run_are_set_and_removed_by_forms_on_its_page(place: Place) -> None:
    folder = place.run()
    client, form = place.client(), {"form_key": key_of(place, folder)}
    client.post(f"/runs/{folder.run_id}/tag", data=form | {"key": "keep", "value": ""})
    client.post(f"/runs/{folder.run_id}/tag", data=form | {"key": "a=<b>", "value": "ü & 'x'"})
    assert tags_and_properties.read(folder.notes).tags == {"keep": None, "a=<b>": "ü & 'x'"}
    assert "a=&lt;b&gt;" in client.get("/").text
    client.post(f"/runs/{folder.run_id}/tag", data=form | {"remove": "keep"})
    assert list(tags_and_properties.read(folder.notes).tags) == ["a=<b>"]
    for wrong in ({"key": ""}, {"key": "k" * 501}):
        assert client.post(f"/runs/{folder.run_id}/tag", data=form | wrong).status_code in (400, 409)


@pytest.mark.promise("run-readable-name-other-run")
def test_rename_form_changes_the_run_name_and_an_empty_or_too_long_name_is_refused(place: Place) -> None:
    folder = place.run()
    client, form = place.client(), {"form_key": key_of(place, folder)}
    client.post(f"/runs/{folder.run_id}/rename", data=form | {"name": " best <so far> "})
    assert tags_and_properties.read(folder.notes).name == "best <so far>"
    assert "best &lt;so far&gt;" in client.get("/").text
    for wrong in ({"name": " "}, {"name": "n" * 501}, {}):
        assert client.post(f"/runs/{folder.run_id}/rename", data=form | wrong).status_code in (400, 409)
    assert tags_and_properties.read(folder.notes).name == "best <so far>"


def test_form_without_a_valid_csrf_token_is_refused(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client()
    for form in ({}, {"form_key": ""}, {"form_key": "a.b"}, {"form_key": "0123456789abcdef." + "0" * 64}):
        assert client.post(f"/runs/{folder.run_id}/cancel", data=form).status_code in (403, 415)
    body = {"form_key": Token(place.path).form_key()}
    assert client.post(f"/runs/{folder.run_id}/cancel", json=body).status_code == 415
    assert client.post(f"/runs/{folder.run_id}/tag", content=b"x" * 100_000).status_code in (413, 415)
    assert not folder.cancel_request.exists()


@pytest.mark.promise("cancel-rerun-tags-go-command")
def test_read_only_server_has_no_forms_and_refuses_posts(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client(read_only=True)
    assert '<form method="post"' not in client.get(f"/runs/{folder.run_id}").text
    form = {"form_key": Token(place.path).form_key()}
    for action in ("archive", "cancel", "comment", "delete", "notes", "rename", "rerun", "tag", "uncomment"):
        assert client.post(f"/runs/{folder.run_id}/{action}", data=form).status_code == 403
    for path in ("/actions", "/new"):
        assert client.post(path, data=form).status_code == 403
    for path in (f"/runs/{folder.run_id}/rerun", "/new"):
        assert client.get(path).status_code == 403
    for path in ("/", "/trash"):
        assert "<button name" not in client.get(path).text
    assert not folder.cancel_request.exists()


def test_rerun_of_a_run_whose_snapshot_is_missing_is_refused(place: Place) -> None:
    folder = place.run()
    form = {"form_key": Token(place.path).form_key()}
    answer = place.client().post(f"/runs/{folder.run_id}/rerun", data=form)
    assert answer.status_code == 422
    assert "no longer in" in answer.text
    assert [path.name for path in place.runs_dir.iterdir() if path.name[0] != "."] == [folder.run_id]


def bulk(place: Place, action: str, *run_ids: str, **more: str) -> tuple[int, dict[str, Any]]:
    body = {"form_key": Token(place.path).form_key(), "action": action, "run": [*run_ids], **more}
    answer = place.client().post("/actions", data=body)
    return answer.status_code, answer.json()


def test_page_of_a_deleted_run_offers_to_restore_it(place: Place) -> None:
    folder = place.run(display_name=HOSTILE)
    client, form = place.client(), {"form_key": key_of(place, folder)}
    client.headers["accept"] = "text/html"
    answer = client.post(f"/runs/{folder.run_id}/delete", data=form)
    assert answer.status_code == 410
    assert "This run was deleted." in answer.text
    assert "<script>document" not in answer.text
    assert folder.run_id not in client.get("/").text
    assert folder.run_id in client.get("/trash").text
    assert client.get(f"/runs/{folder.run_id}/files").status_code == 410
    assert client.post(f"/runs/{folder.run_id}/rename", data=form | {"name": "late"}).status_code == 410
    back = client.post("/actions", data=form | {"action": "restore", "run": folder.run_id}, follow_redirects=False)
    assert (back.status_code, back.headers["location"]) == (303, f"runs/{folder.run_id}")
    assert client.get(f"/runs/{folder.run_id}").status_code == 200
    assert "The trash is empty." in client.get("/trash").text


def test_page_that_is_open_when_its_run_is_deleted_offers_to_restore_the_run(place: Place) -> None:
    folder = place.run()
    client = place.client()
    assert client.get(f"/runs/{folder.run_id}/gone").status_code == 204
    bulk(place, "delete", folder.run_id)
    text = client.get(f"/runs/{folder.run_id}/gone").text
    assert "Undo: restore the run" in text
    assert 'action="../../actions"' in text
    trash.purge(trash.deleted(place.path)[0])
    text = client.get(f"/runs/{folder.run_id}/gone").text
    assert "not in the trash any more" in text
    assert "<form" not in text
    read_only = place.client(read_only=True)
    assert "<form" not in read_only.get(f"/runs/{folder.run_id}/gone").text


def test_running_run_is_not_deleted(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    page = place.client().get(f"/runs/{folder.run_id}").text
    assert "/delete" not in page
    answer = place.client().post(f"/runs/{folder.run_id}/delete", data={"form_key": key_of(place, folder)})
    assert answer.status_code == 409
    assert f"paceline cancel --wait {folder.run_id}" in answer.json()["error"]


def test_bulk_deletion_reports_each_run_that_was_refused(place: Place) -> None:
    ended = [place.run(f"digits_170000000{number}_0000000{number}").run_id for number in range(3)]
    child = place.run("digits_1700000000_00000000_1", parent_run_id=ended[0]).run_id
    living = place.run("digits_1700000009_00000009", status=states.RUNNING).run_id
    status, said = bulk(place, "delete", *ended, living, "digits_1700000009_00000008")
    assert status == 200
    assert said["done"] == ended
    assert said["text"] == "3 runs are in the trash for 7 days."
    assert [one["run"] for one in said["failed"]] == [living, "digits_1700000009_00000008"]
    assert "is Running" in said["failed"][0]["error"]
    assert "deleted meanwhile" in said["failed"][1]["error"]
    assert store.ids(place.runs_dir) == [living]
    # Undo restores the child together with its parent.
    assert bulk(place, said["undo"], *said["done"])[1]["text"] == "3 runs are restored."
    assert sorted(store.ids(place.runs_dir)) == sorted([*ended, child, living])
    _, said = bulk(place, "tag", *ended, living, key=HOSTILE, value="1")
    assert len(said["done"]) == 4
    assert tags_and_properties.read(place.runs_dir / living / "notes.jsonl").tags == {HOSTILE: "1"}
    bulk(place, said["undo"], *said["done"], key=said["key"])
    assert tags_and_properties.read(place.runs_dir / living / "notes.jsonl").tags == {}
    assert bulk(place, "cancel", living, ended[0])[1]["done"] == [living]
    assert "no longer in" in bulk(place, "rerun", ended[0])[1]["failed"][0]["error"]


@pytest.mark.parametrize(
    ("action", "run_ids", "more", "status"),
    [
        ("explode", ["a"], {}, 400),
        ("delete", [], {}, 400),
        ("delete", ["a"] * 3 + [f"digits_1_{number}" for number in range(200)], {}, 400),
        ("delete", ["a"], {"shell": "rm"}, 400),
    ],
)
def test_invalid_form_for_a_change_of_many_runs_returns_400(
    place: Place, action: str, run_ids: list[str], more: dict[str, str], status: int
) -> None:
    assert bulk(place, action, *run_ids, **more)[0] == status


@pytest.mark.parametrize("action", ["delete", "restore", "archive", "tag", "rerun", "cancel"])
def test_path_in_place_of_a_run_id_is_refused(place: Place, action: str) -> None:
    outside = place.path / "token"
    outside.mkdir()
    for name in ("../token", "/etc", "", "..", "a/b", "\0"):
        status, said = bulk(place, action, name, key="k")
        assert status == 200
        assert said["done"] == []
        assert [one["run"] for one in said["failed"]] == [name]
    assert outside.is_dir()


def test_archiving_without_javascript_returns_a_page_with_an_undo_button(place: Place) -> None:
    folder = place.run()
    body = {"form_key": Token(place.path).form_key(), "action": "archive", "run": folder.run_id}
    text = place.client().post("/actions", data=body, headers={"accept": "text/html"}).text
    assert "1 run is archived." in text
    assert '<input type="hidden" name="action" value="unarchive">' in text


def test_archived_run_is_listed_only_on_request(place: Place) -> None:
    folder, other = place.run(display_name="old"), place.run("digits_1700000001_00000002")
    client, form = place.client(), {"form_key": key_of(place, folder)}
    page = client.post(f"/runs/{folder.run_id}/archive", data=form, headers={"accept": "text/html"}).text
    assert "Unarchive" in page
    assert f'data-run="{folder.run_id}"' not in place.client().get("/").text
    archived = place.client().get("/?archived=1").text
    assert f'data-run="{folder.run_id}"' in archived
    assert f'data-run="{other.run_id}"' not in archived
    client.post(f"/runs/{folder.run_id}/archive", data=form | {"undo": "1"})
    assert f'data-run="{folder.run_id}"' in place.client().get("/").text


def test_notes_are_shown_as_safe_markdown(place: Place) -> None:
    folder = place.run()
    client, form = place.client(), {"form_key": key_of(place, folder)}
    text = f"# Best\r\n\r\n**so far** [x](javascript:alert(1)) {HOSTILE} ![i](http://evil.example/x.png)"
    client.post(f"/runs/{folder.run_id}/notes", data=form | {"text": text})
    assert "\r" not in str(tags_and_properties.read(folder.notes).description)
    page = client.get(f"/runs/{folder.run_id}").text
    assert "<h1>Best</h1>" in page
    assert "<strong>so far</strong>" in page
    assert "<script>document" not in page
    assert 'href="javascript' not in page
    assert "<img" not in page
    assert client.post(f"/runs/{folder.run_id}/notes", data=form | {"text": "x" * 20_001}).status_code == 400
    client.post(f"/runs/{folder.run_id}/notes", data=form | {"text": ""})
    assert '<div class="notes">' not in client.get(f"/runs/{folder.run_id}").text


def test_csrf_token_of_another_workspace_is_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other")
    folder = place.run()
    form = {"form_key": Token(other.path).form_key(), "action": "delete", "run": folder.run_id}
    assert place.client().post("/actions", data=form).status_code == 403
    assert folder.path.is_dir()


def test_large_trash_is_split_into_pages_and_restoring_many_runs_reads_no_notes_files(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "_TRASH_ROWS", 2)
    folders = [place.run(f"a_170000000{number}_00000001", display_name=f"name {number}") for number in range(5)]
    trash.delete(place.runs_dir, folders)
    client = place.client()
    pages = [client.get(f"/trash?page={number}").text for number in (1, 2, 3, 99)]
    assert [text.count('aria-label="Restore name') for text in pages] == [2, 2, 1, 1]
    assert 'href="?page=3"' in pages[1]
    names: list[str] = []
    read = tags_and_properties.read
    monkeypatch.setattr(tags_and_properties, "read", lambda path: names.append(str(path)) or read(path))
    _, said = bulk(place, "restore", *(folder.run_id for folder in folders))
    assert said["text"] == "5 runs are restored."
    assert names == []
    assert all(folder.path.is_dir() for folder in folders)


def test_page_of_a_run_with_many_tags_shows_the_first_tags_and_the_total(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place.run()
    with open(folder.notes, "a") as file:
        for number in range(30_000):
            file.write(json.dumps({"tag": f"tag{number}", "value": "x" * (100 if number else 1_000_000)}) + "\n")
            file.write(json.dumps({"property": f"key{number}", "value": "1"}) + "\n")
    client, reads = place.client(), 0
    read = tags_and_properties.read

    def counted(path: Path) -> tags_and_properties.Notes:
        nonlocal reads
        reads += path == folder.notes
        return read(path)

    monkeypatch.setattr(tags_and_properties, "read", counted)
    for path in ("", "/details", "/files", "/head"):
        text = client.get(f"/runs/{folder.run_id}{path}").text
        assert "and 29800 more tags" in text
        assert ">tag199<" in text
        assert "tag200" not in text
        assert len(text) < 1_000_000
    # The page of the run reads the notes once, and the page of details once more, to compare them with other runs.
    assert reads <= 2
    # On a busy machine, the first list is without the run, because its many tags are still being read.
    wait_until(lambda: "and 980 more" in client.get("/").text, "the list has the run")
    assert len(client.get("/").text) < 100_000
    tags_and_properties.remove_tags(folder.notes, ["tag0"])
    assert ">tag200<" in client.get(f"/runs/{folder.run_id}").text


def test_concurrent_renames_leave_one_of_the_given_names(place: Place) -> None:
    folder = place.run()
    names = [f"name {number} {'x' * 200}" for number in range(40)]
    clients = [place.client() for _ in range(4)]
    key = Token(place.path).form_key()

    def rename(number: int) -> int:
        form = {"form_key": key, "name": names[number]}
        address = f"/runs/{folder.run_id}/rename"
        return int(clients[number % 4].post(address, data=form, follow_redirects=False).status_code)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(rename, range(40))) == {303}
    noted = [line["display_name"] for line in json_lines(folder.notes) if "display_name" in line]
    assert sorted(noted) == sorted(names)
    # All pages show the last name.
    assert tags_and_properties.read(folder.notes).name == noted[-1]
    for path in ("/", f"/runs/{folder.run_id}", f"/compare?run={folder.run_id}"):
        assert noted[-1] in clients[0].get(path).text


def test_request_whose_run_is_deleted_while_it_is_handled_returns_no_server_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is deleted, or purged, after the view has found it."""
    find = common.folder_of
    paths = (
        *(
            "",
            "/live",
            "/head",
            "/head/live",
            "/curves?name=loss",
            "/others",
            "/own",
            "/log?last=5",
            "/log/text",
            "/files",
        ),
        *(
            "/files/live",
            "/look/outputs/model.txt",
            "/file/outputs/model.txt",
            "/zip",
            "/details",
            "/details/live",
            "/rerun",
        ),
    )
    for number, path in enumerate(paths):
        for is_purged in (False, True):
            folder = place.run(f"digits_17000{number:05}_0000000{int(is_purged)}")
            (folder.outputs / "model.txt").write_text("1")
            log_values(folder, "loss", [1.0, 2.0])
            say(folder, "line\n")
            client = place.client()

            def found(request: Any, folder: RunFolder = folder, is_purged: bool = is_purged) -> RunFolder:
                there = find(request)
                trash.delete(place.runs_dir, [folder])
                trash.purge(trash.deleted(place.path)[0]) if is_purged else None
                return there

            with monkeypatch.context() as patch:
                for module in (common, run, start):
                    patch.setattr(module, "folder_of", found, raising=False)
                answer = client.get(f"/runs/{folder.run_id}{path}", headers={"accept": "text/html"})
            assert answer.status_code in (200, 204, 404, 409, 410), (path, is_purged, answer.text)


def test_saving_notes_does_not_overwrite_a_concurrent_edit(place: Place) -> None:
    folder = place.run()
    client = place.client()
    form = {"form_key": Token(place.path).form_key()}

    def save(text: str, page: str) -> int:
        (was,) = re.findall(r'name="was" value="(\w+)"', page)
        address = f"/runs/{folder.run_id}/notes"
        return int(client.post(address, data=form | {"text": text, "was": was}, follow_redirects=False).status_code)

    first, second = (client.get(f"/runs/{folder.run_id}").text for _ in range(2))
    assert [save("mine", first), save("theirs", second)] == [303, 409]
    assert tags_and_properties.read(folder.notes).description == "mine"
    assert save("theirs", client.get(f"/runs/{folder.run_id}").text) == 303
    assert tags_and_properties.read(folder.notes).description == "theirs"


def test_comments_are_plain_text_on_the_page(place: Place) -> None:
    folder = place.run()
    client, form = place.client(), {"form_key": key_of(place, folder)}
    text = f"**no** markdown\r\n{HOSTILE} [x](javascript:alert(1)) \u202e"
    assert (
        client.post(f"/runs/{folder.run_id}/comment", data=form | {"text": text}, follow_redirects=False).status_code
        == 303
    )
    (comment,) = tags_and_properties.read(folder.notes).comments.values()
    page = client.get(f"/runs/{folder.run_id}").text
    assert "<p>**no** markdown\n" in page
    assert HOSTILE not in page
    assert "\u202e" not in page
    for wrong in ("", "x" * 2001):
        assert client.post(f"/runs/{folder.run_id}/comment", data=form | {"text": wrong}).status_code == 409
    assert client.post(f"/runs/{folder.run_id}/comment", data={"text": "no key"}).status_code == 403
    client.post(f"/runs/{folder.run_id}/uncomment", data=form | {"comment": comment.id})
    assert "markdown" not in client.get(f"/runs/{folder.run_id}").text
    assert client.post(f"/runs/{folder.run_id}/uncomment", data=form | {"comment": comment.id}).status_code == 409


def test_page_shows_the_last_100_comments(place: Place) -> None:
    folder = place.run()
    for number in range(103):
        tags_and_properties.add_comment(folder.notes, f"comment {number:03}")
    page = place.client().get(f"/runs/{folder.run_id}").text
    assert "comment 102<" in page
    assert "comment 002<" not in page
    assert f"3 earlier: <code>paceline comment {folder.run_id}</code>" in page
