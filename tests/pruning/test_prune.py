from __future__ import annotations

import datetime as dt
import os
import time
from pathlib import Path

import pytest

from paceline.containers import layer
from paceline.data.transfer.cache import DataCache
from paceline.environments.environment import Environment
from paceline.environments.store import EnvironmentStore
from paceline.errors import DataError, UserError, WorkspaceError
from paceline.models import check, registry, sources, staging
from paceline.models.record import ModelRecord
from paceline.pruning import Pruned, PrunePolicy, environments, prune
from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.system import files
from paceline.workspace import Workspace
from tests.helpers import make_job, make_record, make_run, write_tree

DAY = 86400


def make(
    workspace: Path, number: int, *, days: float = 0, status: str = states.COMPLETED, size: int = 0, **values
) -> str:
    """Make a run that ended so long ago, with a file of this size, and return its id. Its lock is free unless it lives."""
    experiment = values.pop("experiment", "digits")
    run_id = f"{experiment}_{1_700_000_000 + number}_0000000{number % 10}"
    when = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=days)
    text = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    folder, fd = make_run(workspace / "runs", run_id, experiment=experiment, created_utc=text, **values)
    store.change(folder, store.stored(folder), status, ended_utc=text if status in states.TERMINAL else None)
    if status in states.TERMINAL:
        os.close(fd)
    else:
        LIVING.append(fd)
    write_tree(folder.path, {"outputs/file": b"x" * size})
    return run_id


LIVING: list[int] = []


@pytest.fixture(autouse=True)
def _living_runs_end():
    yield
    while LIVING:
        os.close(LIVING.pop())


def gone(pruned: Pruned) -> list[str]:
    return [run.name for run in pruned.runs]


# --- Pruning of runs


@pytest.mark.promise("pruning-never-takes-run-lives")
def test_prune_removes_old_runs_except_queued_runs_and_runs_with_the_tag_keep(tmp_path):
    old, new = make(tmp_path, 1, days=40), make(tmp_path, 2, days=20)
    queued = make(tmp_path, 3, days=50, status=states.QUEUED)
    kept = make(tmp_path, 4, days=60)
    tags_and_properties.set_tags(RunFolder(tmp_path / "runs" / kept).notes, {"keep": None})
    policy = PrunePolicy(older_than_s=30 * DAY)

    dry = prune(tmp_path, policy, ["runs"], dry_run=True)
    assert gone(dry) == [old]
    assert len(store.ids(tmp_path / "runs")) == 4
    assert prune(tmp_path, policy, ["runs"]) == dry
    assert sorted(store.ids(tmp_path / "runs")) == sorted([new, queued, kept])


def test_keep_last_keeps_the_newest_runs_of_each_experiment(tmp_path):
    for number in range(1, 5):
        make(tmp_path, number, days=10 - number)
    make(tmp_path, 5, days=99, experiment="other")
    failed = make(tmp_path, 6, days=9, status=states.FAILED)
    policy = PrunePolicy(keep_last=2)
    assert gone(prune(tmp_path, policy, ["runs"], dry_run=True)) == [
        f"digits_{1_700_000_000 + number}_0000000{number}" for number in (1, 2, 3)
    ]
    assert gone(prune(tmp_path, PrunePolicy(keep_last=0, status=states.FAILED), ["runs"], dry_run=True)) == [failed]
    assert gone(prune(tmp_path, PrunePolicy(experiment="other"), ["runs"], dry_run=True)) == [
        "other_1700000005_00000005"
    ]
    # Prune removes a run only if all criteria allow it.
    assert len(gone(prune(tmp_path, PrunePolicy(keep_last=1, older_than_s=7.5 * DAY), ["runs"], dry_run=True))) == 2


def test_max_bytes_removes_oldest_runs_until_the_total_size_fits(tmp_path):
    ids = [make(tmp_path, number, days=10 - number, size=1_000_000) for number in range(1, 5)]
    living = make(tmp_path, 5, days=50, size=1_000_000, status=states.RUNNING)
    found = prune(tmp_path, PrunePolicy(max_bytes=3_500_000), ["runs"])
    assert gone(found) == ids[:2]
    assert found.size_bytes > 2_000_000
    assert sorted(store.ids(tmp_path / "runs")) == sorted([*ids[2:], living])


def test_prune_removes_a_run_together_with_its_children(tmp_path):
    root = make(tmp_path, 1, days=40)
    child = make(tmp_path, 2, days=40, parent_run_id=root)
    grandchild = make(tmp_path, 3, days=1, parent_run_id=child)
    orphan = make(tmp_path, 4, days=40, parent_run_id="digits_1_gone")
    policy = PrunePolicy(older_than_s=30 * DAY)
    assert gone(prune(tmp_path, policy, ["runs"], dry_run=True)) == [orphan]
    assert gone(prune(tmp_path, PrunePolicy(older_than_s=0, keep_last=1), ["runs"], dry_run=True)) == [
        grandchild,
        child,
        root,
    ]
    make(tmp_path, 5, parent_run_id=grandchild, status=states.RUNNING)
    assert gone(prune(tmp_path, PrunePolicy(older_than_s=0), ["runs"], dry_run=True)) == [orphan]


def test_without_a_criterion_no_run_is_removed(tmp_path):
    make(tmp_path, 1, days=400)
    assert not prune(tmp_path, PrunePolicy())
    with pytest.raises(UserError, match="which runs are to go"):
        prune(tmp_path, PrunePolicy(), ["runs"])
    with pytest.raises(UserError, match="'logs' can't be pruned"):
        prune(tmp_path, PrunePolicy(), ["logs"])
    for values in ({"older_than_s": -1}, {"keep_last": -1}, {"max_bytes": -1}, {"status": "Done"}):
        with pytest.raises(UserError):
            PrunePolicy(**values)


# --- Pruning of snapshots


def snapshot(workspace: Path, name: str, content: bytes = b"code", *, days: float = 1) -> Path:
    path = write_tree(workspace / "snapshots" / name, {"train.py": content})
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def test_prune_removes_unused_snapshots_but_not_fresh_ones(tmp_path):
    linked, recorded, unused, fresh = (snapshot(tmp_path, name, name.encode() * 9) for name in ("l", "r", "u", "f"))
    os.utime(fresh)
    run = RunFolder(tmp_path / "runs" / make(tmp_path, 1, days=40))
    run.snapshot.symlink_to(os.path.relpath(linked, run.path))
    make(tmp_path, 2, status=states.QUEUED, snapshot_id="r")
    write_tree(tmp_path / "snapshots", {".scans/a.json": b"{}", ".gone-x/a": b"", ".new-1-2/a": b""})

    dry = prune(tmp_path, PrunePolicy(), ["snapshots"], dry_run=True)
    assert [(one.name, one.size_bytes) for one in dry.snapshots] == [("u", 9)]
    assert prune(tmp_path, PrunePolicy(), ["snapshots"]) == dry
    left = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert left == sorted([".new-1-2", ".scans", "f", "l", "r"])
    assert not unused.exists()
    assert recorded.exists()


def test_snapshot_is_removed_with_its_last_run_and_listed_in_a_dry_run(tmp_path):
    path = snapshot(tmp_path, "s")
    make(tmp_path, 1, days=40, snapshot_id="s")
    policy = PrunePolicy(older_than_s=30 * DAY)
    for dry_run in (True, False):
        found = prune(tmp_path, policy, ["runs", "snapshots"], dry_run=dry_run)
        assert (len(found.runs), [one.name for one in found.snapshots]) == (1, ["s"])
    assert not path.exists()


def test_size_of_removed_snapshots_excludes_files_hard_linked_in_a_kept_snapshot(tmp_path):
    for name in ("a", "b", "c"):
        snapshot(tmp_path, name, name.encode())
    for name in ("b", "c"):
        os.link(tmp_path / "snapshots/a/train.py", tmp_path / f"snapshots/{name}/shared")
        os.utime(tmp_path / "snapshots" / name, (1, 1))
    make(tmp_path, 1, snapshot_id="c")
    found = prune(tmp_path, PrunePolicy(), ["snapshots"])
    assert [(one.name, one.size_bytes) for one in found.snapshots] == [("a", 0), ("b", 1)]


def test_snapshot_requested_by_a_new_run_during_prune_is_not_removed(tmp_path, monkeypatch):
    path = snapshot(tmp_path, "s")
    rename = os.rename

    def asked_for_meanwhile(source, target):
        os.utime(source)
        rename(source, target)

    monkeypatch.setattr("paceline.pruning.snapshots.os.rename", asked_for_meanwhile)
    assert not prune(tmp_path, PrunePolicy(), ["snapshots"])
    assert (path / "train.py").exists()


# --- Pruning of environments


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """Make environments on images, which need no build because they have no interpreter: key -> days since the last use."""
    ages = {"a": 40, "b": 20, "c": 1}
    folder = tmp_path / "environments/images"
    for key, days in ages.items():
        write_tree(folder / key, {"layer/file": b"x" * 1000})
        write_tree(folder, {f"{key}.json": b"", f"{key}.lock": b""})
        os.utime(folder / f"{key}.lock", (time.time() - days * DAY,) * 2)

    def read_layer(folder: Path, key: str):
        if not (folder / f"{key}.json").exists():
            return None
        return layer.Layer(prefix=str(folder / key / "layer"), python="python", bin_dir="bin")

    monkeypatch.setattr(layer, "read_layer", read_layer)
    return folder


def keys(found: Pruned) -> list[str]:
    return sorted(one.name for one in found.environments)


def test_prune_removes_environments_by_age_or_size_except_the_environment_of_a_running_run(tmp_path, layers):
    def dry(**values) -> list[str]:
        return keys(prune(tmp_path, PrunePolicy(**values), ["environments"], dry_run=True))

    assert dry() == ["a", "b", "c"]
    assert dry(older_than_s=30 * DAY) == ["a"]
    assert dry(max_bytes=1500) == ["a", "b"]
    run = RunFolder(tmp_path / "runs" / make(tmp_path, 1, status=states.RUNNING))
    files.write_json(run.environment, {"key": "a"})
    assert dry() == ["b", "c"]
    assert dry(max_bytes=1500) == ["b", "c"]
    found = prune(tmp_path, PrunePolicy(older_than_s=10 * DAY), ["environments"])
    assert [(one.name, one.size_bytes) for one in found.environments] == [("b", 1000)]
    assert not (layers / "b").exists()


def test_prune_keeps_the_environment_of_a_queued_run(tmp_path, monkeypatch):
    class Found:
        key = "k"

    monkeypatch.setattr(EnvironmentStore, "find", lambda self, environment, python: Found())
    job = make_job(environment=Environment(pip_packages=("einops",)))
    queued = make_record(status=states.QUEUED, job=job)
    assert environments._needed(tmp_path, EnvironmentStore(tmp_path), [queued]) == {"k"}


def test_env_prune_keeps_environments_of_live_runs(tmp_path, layers):
    assert environments.free_keys(tmp_path) == {"a", "b", "c"}
    run = RunFolder(tmp_path / "runs" / make(tmp_path, 1, status=states.RUNNING))
    files.write_json(run.environment, {"key": "a"})
    assert environments.free_keys(tmp_path) == {"b", "c"}
    assert environments.free_keys(tmp_path / "none") == set()


def test_package_layers_are_pruned_only_by_age_or_size(tmp_path, layers):
    assert not prune(tmp_path, PrunePolicy(), dry_run=True)
    assert keys(prune(tmp_path, PrunePolicy(older_than_s=30 * DAY), dry_run=True)) == ["a"]
    assert not prune(tmp_path, PrunePolicy(keep_last=3), dry_run=True)


# --- Pruning of cached data


def test_prune_removes_cached_files_by_age_or_size_except_files_in_use(tmp_path, monkeypatch):
    cache = DataCache(tmp_path / "cache")
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(cache.folder))
    for key, days in (("aa1", 40), ("bb2", 20), ("cc3", 1), ("dd4", 50)):
        path = write_tree(cache.folder / "objects" / key[:2], {key: b"x" * 100}) / key
        os.utime(path, (time.time() - days * DAY, 10**9))
    os.link(cache.folder / "objects/dd/dd4", tmp_path / "in use")

    assert prune(tmp_path, PrunePolicy(older_than_s=30 * DAY), ["data"], dry_run=True).data_bytes == 100
    assert prune(tmp_path, PrunePolicy(max_bytes=250), ["data"], dry_run=True).data_bytes == 200
    assert prune(tmp_path, PrunePolicy(), ["data"], dry_run=True).data_bytes == 300
    assert prune(tmp_path, PrunePolicy(older_than_s=10 * DAY), ["data"]).data_bytes == 200
    assert sorted(path.name for path in (cache.folder / "objects").glob("*/*")) == ["cc3", "dd4"]


# --- `Workspace.prune`


def test_workspace_prune_parses_durations_and_sizes(tmp_path):
    workspace = Workspace(tmp_path)
    old = make(tmp_path, 1, days=40)
    make(tmp_path, 2, days=1)
    assert gone(workspace.prune(older_than="30d", kinds=["runs"], dry_run=True)) == [old]
    assert gone(workspace.prune(older_than=dt.timedelta(days=30), kinds=["runs"], dry_run=True)) == [old]
    assert gone(workspace.prune(max_size="1TB", kinds=["runs"], dry_run=True)) == []
    with pytest.raises(WorkspaceError, match="older_than: 'long' is not a duration"):
        workspace.prune(older_than="long")
    with pytest.raises(DataError, match="'much' is not a size"):
        workspace.prune(max_size="much")
    assert gone(workspace.prune(older_than="30d", kinds=["runs"])) == [old]


# --- Pruning of models


def registered(workspace: Path, content: str, run_id: str | None = None) -> ModelRecord:
    run = {"run_id": run_id, "snapshot_id": "a" * 64} if run_id else None
    source = write_tree(workspace / "made", {"weights": content})
    return registry.add(workspace, "digits", sources.local(source), run=run)


@pytest.mark.promise("pruning-never-takes-version-nor")
def test_run_and_snapshot_of_a_registered_model_are_pruned_only_after_the_model_is_removed(tmp_path):
    maker, other = make(tmp_path, 1, days=40), make(tmp_path, 2, days=40)
    for name in ("a" * 64, "b" * 64):
        write_tree(tmp_path / "snapshots" / name, {"train.py": "x"})
        os.utime(tmp_path / "snapshots" / name, (time.time() - DAY,) * 2)
    record = registered(tmp_path, "1", maker)
    found = prune(tmp_path, PrunePolicy(older_than_s=DAY), ["runs", "snapshots"])
    assert gone(found) == [other]
    assert [one.name for one in found.snapshots] == ["b" * 64]
    registry.remove(tmp_path, record)
    found = prune(tmp_path, PrunePolicy(older_than_s=DAY), ["runs", "snapshots"])
    assert (gone(found), [one.name for one in found.snapshots]) == ([maker], ["a" * 64])


@pytest.mark.promise("pruning-never-takes-version-nor")
def test_prune_removes_unused_model_content_and_killed_registrations_but_no_version(tmp_path, monkeypatch):
    first, second = registered(tmp_path, "1" * 500), registered(tmp_path, "2" * 300)
    # Make the files that are left by a kill in the middle of a removal, and by a kill during a copy.
    registry.versions_of(tmp_path).take_away("digits", first.version, registry.parts_dir(tmp_path) / "gone-1")
    write_tree(registry.parts_dir(tmp_path), {"0000aaaa-1/files/part": "p" * 7})
    monkeypatch.setattr(staging, "_ABANDONED_S", -1.0)

    looked = prune(tmp_path, PrunePolicy(), ["models"], dry_run=True)
    assert looked.models_bytes >= 500
    assert registry.parts_dir(tmp_path).joinpath("gone-1").exists()
    assert prune(tmp_path, PrunePolicy()).models_bytes >= 507
    assert os.listdir(registry.parts_dir(tmp_path)) == []
    assert [path.stat().st_size for path in registry.blobs_dir(tmp_path).glob("*/*")] == [300]
    assert check.changes(registry.files_dir(tmp_path, second), second) == []
    assert not prune(tmp_path, PrunePolicy())
