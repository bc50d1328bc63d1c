"""Runs start from the page: a run again with changes, or a job file. A wrong form starts nothing and marks the field."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline import rerun
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.ui.guard import Token
from paceline.workspace import Workspace
from tests.helpers import make_job, wait_until
from tests.test_rerun import SCRIPT
from tests.ui.conftest import HOSTILE, Place


def with_source(place: Place, script: str = SCRIPT, **values: Any) -> RunFolder:
    folder = place.run(**values)
    source = place.path / "snapshots" / ("ab" * 32)
    source.mkdir(parents=True, exist_ok=True)
    (source / "train.py").write_text(script)
    folder.snapshot.symlink_to(source)
    return folder


def send(place: Place, path: str, form: Mapping[str, str]) -> Any:
    body = {"form_key": Token(place.path).form_key(), **form}
    return place.client().post(path, data=body, follow_redirects=False)


def error_of(text: str, field: str) -> str:
    """Return the field's error text, found by the attribute that screen readers use."""
    found = re.search(rf'name="{re.escape(field)}" [^>]*aria-invalid="true" aria-describedby="([^"]+)"', text)
    assert found, f"{field} is not marked"
    said = re.search(rf'id="{found[1]}">([^<]*)<', text)
    assert said
    return said[1]


def test_rerun_form_has_the_script_options_with_the_values_of_the_run(place: Place) -> None:
    folder = with_source(place, job=make_job(arguments=("--epochs", "3", "--opt", "sgd", "--odd", HOSTILE)))
    text = place.client().get(f"/runs/{folder.run_id}/rerun").text
    assert re.search(r'name="option:--epochs" value="3"', text)
    assert "<option selected>sgd</option><option>adam</option>" in text.replace("\n", "")
    assert "<script>document" not in text
    assert 'name="option:--odd"' in text
    # Each control has a label.
    ids = set(re.findall(r'<(?:input|select)[^>]* id="([^"]+)"', text))
    assert ids <= set(re.findall(r'<label[^>]* for="([^"]+)"', text))


def test_rerun_form_suggests_options_and_values_from_earlier_runs_of_the_script(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys\nprint(sys.argv)\n"
    for number, words in enumerate((("--lr", "0.3"), ("--lr", "0.1", "--depth", HOSTILE), ("--lr", "0.3"))):
        with_source(place, script, run_id=f"digits_170000000{number}_00000001", job=make_job(arguments=words))
    with_source(
        place,
        script,
        run_id="digits_1700000004_00000001",
        job=make_job(entry_script="other.py", arguments=("--x", "1")),
    )
    folder = with_source(place, script, run_id="digits_1700000005_00000001", job=make_job(arguments=("--lr", "0.2")))
    text = place.client().get(f"/runs/{folder.run_id}/rerun").text
    (lr,) = re.findall(r'<datalist id="(o\d+)-earlier"><option value="0.3"><option value="0.1"></datalist>', text)
    assert f'name="option:--lr" value="0.2" list="{lr}-earlier"' in text
    assert 'name="option:--depth" value=""' in text
    assert "option:--x" not in text
    assert "<script>document" not in text
    submitted: list[tuple[str, ...]] = []
    monkeypatch.setattr(rerun, "submit", lambda job, *args, **values: submitted.append(job.arguments) or folder)
    assert send(place, f"/runs/{folder.run_id}/rerun", {"option:--lr": "0.2", "option:--depth": "4"}).status_code == 303
    assert submitted == [("--lr", "0.2", "--depth", "4")]


def test_invalid_fields_of_a_rerun_form_are_marked_and_no_run_starts(place: Place) -> None:
    folder = with_source(place, job=make_job(arguments=("--epochs", "3")))
    form = {
        "option:--epochs": "",
        "option:--lr": "fast",
        "node_count": "many",
        "process_count_per_node": "0",
        "compute_target": "moon",
        "distributed_backend": "",
        "arguments": "'open",
    }
    answer = send(place, f"/runs/{folder.run_id}/rerun", form | {"arguments": ""})
    assert answer.status_code == 422
    assert "Nothing was started." in answer.text
    assert "fast must be of type float" in error_of(answer.text, "option:--lr")
    assert "requires" in error_of(answer.text, "option:--epochs")
    assert "many" in error_of(answer.text, "node_count")
    assert "at least 1" in error_of(answer.text, "process_count_per_node")
    assert "no compute target" in error_of(answer.text, "compute_target")
    # After an error, the form still has the values that the user has entered.
    assert 'value="fast"' in answer.text
    quotes = send(place, f"/runs/{folder.run_id}/rerun", {"arguments": "'open", "option:--epochs": "3"})
    assert "Close the quotes" in error_of(quotes.text, "arguments")
    two = send(place, f"/runs/{folder.run_id}/rerun", {"process_count_per_node": "2", "distributed_backend": ""})
    assert "find each other" in error_of(two.text, "distributed_backend")
    assert store.ids(place.runs_dir) == [folder.run_id]


def test_rerun_form_with_an_unknown_field_is_refused(place: Place) -> None:
    folder = with_source(place, job=make_job(arguments=("--epochs", "3")))
    for name in ("option:--rate", "source_directory", "entry_script", HOSTILE):
        answer = send(place, f"/runs/{folder.run_id}/rerun", {name: "x"})
        assert answer.status_code == 400
        assert "unknown field" in answer.json()["error"]
    assert send(place, "/new", {"text": "", "path": "/etc/passwd"}).status_code == 400


def test_rerun_applies_only_the_changed_form_fields(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_source(place, job=make_job(arguments=("--epochs", "3", "--lr=0.1", "--amp")), status=states.FAILED)
    (folder.checkpoints / "step_1").mkdir(parents=True)
    started: list[Any] = []

    def submit(job: Any, *args: Any, **more: Any) -> RunFolder:
        started.append((job, more))
        return folder

    monkeypatch.setattr(rerun, "submit", submit)
    page = place.client().get(f"/runs/{folder.run_id}/rerun").text
    assert re.search(r'name="resume" value="1" id="resume" checked', page)
    form = {
        **{"option:--epochs": "3", "option:--lr": "0.5", "option:--amp": "false", "option:--opt": "", "resume": "1"},
        **{"arguments": "--more 'a b'", "compute_target": "local", "node_count": "1", "process_count_per_node": "2"},
        **{"distributed_backend": "gloo", "display_name": "second"},
    }
    answer = send(place, f"/runs/{folder.run_id}/rerun", form)
    assert answer.status_code == 303
    ((job, more),) = started
    assert job.arguments == ("--epochs", "3", "--lr=0.5", "--no-amp", "--more", "a b")
    assert (job.world_size, job.distributed_backend) == (2, "gloo")
    assert (more["display_name"], more["checkpoints"]) == ("second", folder.checkpoints)


def test_sweep_offers_no_rerun_form(place: Place) -> None:
    folder = place.run(kind="sweep", sweep={"space": {}})
    answer = place.client().get(f"/runs/{folder.run_id}/rerun")
    assert answer.status_code == 409
    assert "paceline sweep more" in answer.json()["error"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a job"),
        ("- a", "is not a job"),
        ("entry_script: [", "is not YAML"),
        ("entry_script: train.py\nnodes: 2\n", "line 2: unknown key 'nodes'. Did you mean node_count?"),
        ("entry_script: none.py\n", "none.py"),
        ("entry_script: train.py\ncompute_target: moon\n", "moon"),
        ("entry_script: train.py\ntags: {a: !!python/object/apply:os.system [id]}\n", "tags takes a mapping"),
        ("entry_script: train.py\nnode_count: many\n", "'many' is not a number"),
    ],
)
def test_invalid_job_file_in_the_new_run_form_is_explained_and_no_run_starts(
    place: Place, text: str, said: str
) -> None:
    (place.path.parent / "train.py").write_text("")
    answer = send(place, "/new", {"text": text})
    assert answer.status_code == 422
    assert said in answer.text.replace("&#39;", "'")
    assert 'aria-invalid="true"' in answer.text
    assert store.ids(place.runs_dir) == []


def test_new_run_form_offers_the_job_files_of_the_project(place: Place) -> None:
    project = place.path.parent
    (project / "jobs").mkdir()
    (project / "jobs" / "a.yaml").write_text("entry_script: train.py\n")
    (project / "other.yaml").write_text("x: 1\n")
    (project / ".secret.yaml").write_text("entry_script: train.py\n")
    (project / "binary.yml").write_bytes(b"\xff\xfe")
    os.mkfifo(project / "pipe.yaml")
    text = place.client().get("/new").text
    assert re.findall(r"<option>([^<]*)</option>", text) == ["jobs/a.yaml"]
    text = place.client().get("/new?file=jobs/a.yaml").text
    assert "entry_script: train.py</textarea>" in text.replace("\n</textarea>", "</textarea>")
    for name in ("../x.yaml", "/etc/passwd", ".secret.yaml", "other.yaml"):
        assert place.client().get("/new", params={"file": name}).status_code == 404


@pytest.mark.slow
def test_job_file_starts_a_run_in_the_workspace_of_the_page(tmp_path: Path) -> None:
    Workspace(tmp_path / ".paceline")
    (tmp_path / "train.py").write_text("print('started from a page')\n")
    place = Place.__new__(Place)
    place.path, place.runs_dir, place._held = tmp_path / ".paceline", tmp_path / ".paceline" / "runs", []
    answer = send(place, "/new", {"text": "entry_script: train.py\nexperiment: pages\n"})
    assert answer.status_code == 303
    folder = RunFolder(place.runs_dir / answer.headers["location"].rpartition("/")[2])
    wait_until(lambda: store.stored(folder).is_terminal, "the run's end")
    assert store.stored(folder).status == states.COMPLETED
    assert "started from a page" in folder.rank_log(1, 0).read_text()
