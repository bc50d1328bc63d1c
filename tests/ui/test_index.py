"""The list's own look at the runs: each record once, and again when it has changed."""

from __future__ import annotations

import shutil

import pytest

from paceline.runs import read, states, tags_and_properties
from paceline.system import files
from paceline.ui import index as index_module
from paceline.ui.index import Index
from tests.ui.conftest import Place


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The records that were read; and no look is too early."""
    found: list[str] = []

    def read_json(path: object) -> object:
        *_, run_id, name = str(path).split("/")
        if name == "state.json":
            found.append(run_id)
        return files.read_json(path)  # type: ignore[arg-type]

    monkeypatch.setattr(read, "read_json", read_json)
    monkeypatch.setattr(index_module, "_FRESH_S", 0.0)
    monkeypatch.setattr(index_module, "_REST", 0.0)
    return found


@pytest.mark.promise("run-ended-read-once-list")
def test_a_run_that_has_ended_is_read_once(place: Place, reads: list[str]) -> None:
    done, live = place.run("a_1700000001_00000001"), place.run("a_1700000002_00000001", states.RUNNING)
    index = Index(place.runs_dir)
    for _ in range(3):
        index.refresh()
    assert sorted(reads) == [done.run_id, live.run_id, live.run_id, live.run_id]
    assert [entry.run_id for entry in index.entries()] == [live.run_id, done.run_id]


def test_index_follows_new_changed_and_removed_runs(place: Place, reads: list[str]) -> None:
    done = place.run("a_1700000001_00000001")
    index = Index(place.runs_dir)
    index.refresh()
    version = index.version
    index.refresh()
    assert index.version == version
    tags_and_properties.set_tags(done.notes, {"seen": 1})
    index.refresh()
    assert index.version > version
    assert index.entries()[0].tags == {"seen": "1"}
    other = place.run("a_1700000002_00000001")
    index.refresh()
    assert index.ids == [other.run_id, done.run_id]
    shutil.rmtree(other.path)
    index.refresh()
    assert [entry.run_id for entry in index.entries()] == [done.run_id]


def test_a_record_that_can_t_be_read_hides_no_other(place: Place, reads: list[str]) -> None:
    broken, odd, done = (place.run(f"a_170000000{n}_00000001") for n in (1, 2, 3))
    broken.state.write_text("{")
    odd.job.write_text("{}")
    index = Index(place.runs_dir)
    index.refresh()
    assert [entry.run_id for entry in index.entries()] == [done.run_id]
