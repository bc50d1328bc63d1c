"""The list's own look at the runs: each record once, and again when it has changed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from paceline.errors import QueryError
from paceline.runs import read, states, store, tags_and_properties, trash
from paceline.runs.read import matches
from paceline.runs.search import index as index_module
from paceline.runs.search import summaries
from paceline.runs.search.index import FactsCache, RunIndex, archived_ids, facts_of, find_runs
from paceline.system import files
from paceline.workspace import Workspace
from tests.ui.conftest import Place, log_values


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
def test_index_reads_the_record_of_an_ended_run_once(place: Place, reads: list[str]) -> None:
    done, live = place.run("a_1700000001_00000001"), place.run("a_1700000002_00000001", states.RUNNING)
    index = RunIndex(place.runs_dir)
    for _ in range(3):
        index.refresh()
    assert sorted(reads) == [done.run_id, live.run_id, live.run_id, live.run_id]
    assert [entry.run_id for entry in index.entries()] == [live.run_id, done.run_id]


def test_index_follows_new_changed_and_removed_runs(place: Place, reads: list[str]) -> None:
    done = place.run("a_1700000001_00000001")
    index = RunIndex(place.runs_dir)
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


def test_index_refresh_reads_tags_of_displayed_runs_each_time_and_of_other_runs_in_rotation(
    place: Place, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = [place.run(f"a_170000000{n}_00000001") for n in range(1, 6)]
    index = RunIndex(place.runs_dir)
    index.refresh()
    monkeypatch.setattr(index_module, "_TURN", 1)
    for folder in done:
        tags_and_properties.set_tags(folder.notes, {"seen": 1})
    index.refresh([done[0].run_id])
    tagged = [facts.run_id for facts in index.entries() if facts.tags]
    # A refresh reads the tags of the given run and of one other run, the newest.
    assert tagged == [done[4].run_id, done[0].run_id]
    for _ in done[1:]:
        index.refresh()
    assert all(facts.tags for facts in index.entries())


def test_index_refresh_with_a_time_limit_returns_before_a_slow_refresh_has_ended(
    place: Place, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.run("a_1700000001_00000001")
    index = RunIndex(place.runs_dir)
    reached, go = threading.Event(), threading.Event()

    def slow(runs_dir: Path) -> list[str]:
        reached.set()
        go.wait(60)
        return ids(runs_dir)

    ids = store.ids
    monkeypatch.setattr(store, "ids", slow)
    for _ in range(2):
        index.refresh_within(0.01)
        assert reached.wait(60)
        assert index.entries() == []
    go.set()
    index.refresh()
    assert len(index.entries()) == 1


def test_run_appears_in_the_index_only_after_its_metrics_were_read(place: Place, reads: list[str]) -> None:
    folders = [place.run(f"a_170000000{n}_00000001") for n in (1, 2)]
    index = RunIndex(place.runs_dir, metrics_s=-1.0)
    index.refresh()
    assert [index.get(folder.run_id) is None for folder in folders] == [True, False]
    index.refresh()
    assert index.get(folders[0].run_id) is not None


def test_unreadable_run_record_does_not_hide_other_runs(place: Place, reads: list[str]) -> None:
    broken, odd, done = (place.run(f"a_170000000{n}_00000001") for n in (1, 2, 3))
    broken.state.write_text("{")
    odd.job.write_text("{}")
    index = RunIndex(place.runs_dir)
    index.refresh()
    assert [entry.run_id for entry in index.entries()] == [done.run_id]


def test_index_follows_the_metrics_of_running_runs(place: Place, reads: list[str]) -> None:
    live, done = place.run("a_1700000002_00000001", states.RUNNING), place.run("a_1700000001_00000001")
    log_values(done, "acc", [0.5, 0.25])
    index = RunIndex(place.runs_dir)
    index.refresh()
    version = index.version
    log_values(live, "acc", [0.75])
    index.refresh()
    assert index.version > version
    assert [facts.metrics.value("acc") for facts in index.entries()] == [0.75, 0.25]


def test_each_index_refresh_reads_metrics_for_a_limited_time(place: Place, reads: list[str]) -> None:
    for number in range(3):
        log_values(place.run(f"a_170000000{number}_00000001"), "acc", [number])
    index = RunIndex(place.runs_dir, metrics_s=0.0)
    for known in (1, 2, 3, 3):
        index.refresh()
        assert sum("acc" in facts.metrics for facts in index.entries()) == known
        assert index.unread == 3 - known


def test_ended_run_is_found_with_its_current_tags_without_reading_its_record_again(
    place: Place, reads: list[str]
) -> None:
    done = place.run("a_1700000001_00000001", tags={"team": "vision"})
    place.run("a_1700000002_00000001", states.RUNNING)
    log_values(done, "acc", [0.5, float("nan")])
    (first,) = find_runs(place.runs_dir, "tags.team = vision")
    reads.clear()
    done.metric_log(0).unlink()
    (again,) = find_runs(place.runs_dir, "metrics.acc.max = 0.5 and state = completed")
    assert done.run_id not in reads
    assert again == first
    tags_and_properties.set_tags(done.notes, {"team": "nlp"})
    assert find_runs(place.runs_dir, "tags.team = vision") == []
    (changed,) = find_runs(place.runs_dir, "tags.team = nlp")
    assert changed.metrics == first.metrics


def test_refresh_waits_for_a_busy_request_but_not_forever_and_not_if_everything_is_wanted(
    place: Place, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.run("a_1700000001_00000001")
    checks: list[int] = []

    def is_busy() -> bool:
        checks.append(len(reads))
        return len(checks) <= 3

    index = RunIndex(place.runs_dir, is_busy=is_busy)
    index.refresh()
    # No record was read before the request had ended.
    assert checks[:4] == [0, 0, 0, 0]
    assert len(reads) == 1
    monkeypatch.setattr(index_module, "_PATIENCE_S", 0.05)
    endless = RunIndex(place.runs_dir, is_busy=lambda: True)
    endless.refresh()
    assert len(endless.entries()) == 1
    monkeypatch.setattr(index_module, "_PATIENCE_S", 1e9)
    index = RunIndex(place.runs_dir, is_busy=lambda: True)
    index.refresh(everything=True)
    assert len(index.entries()) == 1


def test_quick_refresh_lists_the_runs_only_if_their_folder_has_changed(
    place: Place, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_LIST_S", 0.0)
    index = RunIndex(place.runs_dir)
    for number, is_quick, count in ((1, False, 1), (2, True, 1), (3, False, 3)):
        place.run(f"a_170000000{number}_00000001")
        # Keep the time of the folder, as on NFS, where a client may see the change only after a while.
        os.utime(place.runs_dir, (1e9, 1e9))
        index.refresh(is_quick=is_quick)
        assert len(index.entries()) == count
    os.utime(place.runs_dir, (2e9, 2e9))
    place.run("a_1700000004_00000001")
    index.refresh(is_quick=True)
    assert len(index.entries()) == 4


def test_refresh_gives_way_within_a_long_metric_log(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log_values(place.run("a_1700000001_00000001"), "loss", range(1000))
    checks: list[int] = []

    def refreshed(chunk_bytes: int) -> int:
        checks.clear()
        monkeypatch.setattr(summaries, "_CHUNK_BYTES", chunk_bytes)
        index = RunIndex(place.runs_dir, is_busy=lambda: bool(checks.append(1)))
        index.refresh()
        assert index.entries()[0].metrics["loss"].count == 1000
        return len(checks)

    assert refreshed(1 << 21) + 9 < refreshed(1 << 12)


@pytest.mark.parametrize("harm", ["writable", "link", "text", "rows"])
def test_cache_that_others_could_write_or_that_is_broken_is_ignored(place: Place, harm: str) -> None:
    done = place.run("a_1700000001_00000001")
    find_runs(place.runs_dir)
    cache = FactsCache(place.runs_dir)
    content = cache.path.read_text().replace('"Completed"', '"Failed"')
    if harm == "link":
        (place.path / "other").write_text(content)
        cache.path.unlink()
        cache.path.symlink_to(place.path / "other")
    elif harm == "writable":
        cache.path.write_text(content)
        os.chmod(cache.path, 0o666)
    else:
        cache.path.write_text({"text": "\x00{[", "rows": '[1,2]\n{}\n7\n[["a"]]\n'}[harm])
    (facts,) = find_runs(place.runs_dir)
    assert (facts.run_id, facts.status) == (done.run_id, states.COMPLETED)


def test_index_cache_is_rewritten_without_removed_runs_if_it_has_too_many_stale_lines(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_MOST_STALE", 0)
    kept, *gone = (place.run(f"a_170000000{number}_00000001") for number in range(4))
    find_runs(place.runs_dir)
    for folder in gone:
        shutil.rmtree(folder.path)
    find_runs(place.runs_dir)
    cache = FactsCache(place.runs_dir)
    assert cache.path.read_text().count("\n") == 1
    assert cache.path.stat().st_mode & 0o777 == 0o600
    assert [*cache.load([kept.run_id])] == [kept.run_id]


def test_invalid_query_raises_before_any_run_is_read(place: Place, reads: list[str]) -> None:
    place.run()
    with pytest.raises(QueryError):
        find_runs(place.runs_dir, "state = odd")
    assert reads == []


def test_find_runs_omits_child_runs_on_request(place: Place) -> None:
    place.run("s_1700000001_00000001")
    place.run("s_1700000001_00000001_0", parent_run_id="s_1700000001_00000001")
    assert len(find_runs(place.runs_dir)) == 2
    assert [facts.run_id for facts in find_runs(place.runs_dir, sort="name", children=False)] == [
        "s_1700000001_00000001"
    ]


def test_loading_selected_runs_reads_only_records_that_are_not_cached(place: Place, reads: list[str]) -> None:
    folders = [place.run(f"a_170000000{number}_00000001") for number in range(3)]
    assert len(find_runs(place.runs_dir)) == 3
    tags_and_properties.set_tags(folders[1].notes, {"seen": "yes"})
    new = place.run("a_1700000009_00000001")
    reads.clear()
    found = facts_of(place.runs_dir, [new.run_id, folders[1].run_id, "gone_1700000000_00000001"])
    assert sorted(set(reads)) == [new.run_id, "gone_1700000000_00000001"]
    assert [*found] == [new.run_id, folders[1].run_id]
    assert found[folders[1].run_id].tags["seen"] == "yes"
    assert len(FactsCache(place.runs_dir).load([folder.run_id for folder in [*folders, new]])) == 4


def test_trials_of_an_archived_sweep_are_archived(place: Place) -> None:
    sweep = place.run("s_1700000001_00000001")
    trial = place.run(f"{sweep.run_id}_0", parent_run_id=sweep.run_id)
    odd = place.run("o_1700000001_00000002", parent_run_id="../../etc")
    tags_and_properties.set_archived(sweep.notes, True)
    workspace = Workspace(place.path)
    found = {
        flag: {run.id for run in workspace.get_runs(include_children=True, archived=flag)} for flag in (False, True)
    }
    assert found == {False: {odd.run_id}, True: {sweep.run_id, trial.run_id}}
    listed = [matches(read.record(folder), folder, children=True, archived=False) for folder in (sweep, trial, odd)]
    assert listed == [False, False, True]
    client = place.client()
    assert trial.run_id not in client.get("/?trials=1").text
    assert trial.run_id in client.get("/?trials=1&archived=1").text
    assert trial.run_id in client.get("/", params={"parent": sweep.run_id}).text


def test_archiving_a_pipeline_archives_its_steps_and_their_trials(place: Place) -> None:
    pipeline = place.run("p_1700000001_00000001")
    step = place.run(f"{pipeline.run_id}_0", parent_run_id=pipeline.run_id)
    trial = place.run(f"{step.run_id}_1", parent_run_id=step.run_id)
    tags_and_properties.set_archived(pipeline.notes, True)
    assert archived_ids(find_runs(place.runs_dir)) == {pipeline.run_id, step.run_id, trial.run_id}
    assert matches(read.record(trial), trial, children=True, archived=True)


@pytest.mark.parametrize("parent", ["../../etc", "/etc", "..", "a\0b"])
def test_trial_with_an_invalid_parent_id_is_still_listed_and_can_be_deleted(place: Place, parent: str) -> None:
    trial = place.run("s_1700000001_00000001_0", parent_run_id=parent)
    (facts,) = find_runs(place.runs_dir)
    assert (facts.run_id, facts.parent) == (trial.run_id, None)
    assert matches(read.record(trial), trial, children=True, archived=False)
    assert trash.delete(place.runs_dir, [trial]) == [trial.run_id]


def test_two_runs_that_name_each_other_as_parent_cause_no_endless_loop(place: Place) -> None:
    ids = ["s_1700000001_00000001_0", "s_1700000001_00000001_1"]
    folder, _ = (place.run(one, parent_run_id=other) for one, other in (ids, ids[::-1]))
    assert not matches(read.record(folder), folder, children=True, archived=True)


def test_run_record_with_the_id_of_another_run_does_not_replace_the_index_entry_of_that_run(place: Place) -> None:
    folder, copy = place.run("a_1700000001_00000001"), place.run("a_1700000002_00000002")
    copy.job.write_text(
        json.dumps({**json.loads(copy.job.read_text()), "run_id": folder.run_id, "experiment": "other"})
    )
    facts_of(place.runs_dir, [copy.run_id])
    found = facts_of(place.runs_dir, [folder.run_id, copy.run_id])
    assert [facts.run_id for facts in found.values()] == [folder.run_id, copy.run_id]
    assert [facts.experiment for facts in found.values()] == ["a", "other"]


def test_user_without_a_home_folder_has_no_cache(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.run("a_1700000001_00000001")
    # In a container, a user may have no entry in /etc/passwd. Then expanduser returns its argument.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert [facts.run_id for facts in find_runs(place.runs_dir)] == [folder.run_id]
    assert not (tmp_path / "~").exists()
