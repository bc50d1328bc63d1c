"""Versions on disk: added by many at once and by processes that are killed, removed, and swept up."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from paceline.errors import ModelError, ModelNotFoundError
from paceline.models import check, keep, registry, sources, staging
from paceline.system.files import tree_size
from tests.helpers import start_python, wait_until, write_tree

REGISTER = """
import sys
from pathlib import Path
from paceline.models import registry, sources
workspace, path, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(count):
    print(registry.add(workspace, "digits", sources.local(path), tags={"by": path}).version, flush=True)
"""


@pytest.fixture
def workspace(tmp_path) -> Path:
    return tmp_path / "ws"


def add(workspace, tmp_path, files, name="digits"):
    return registry.add(workspace, name, sources.local(write_tree(tmp_path / "made", files)))


def start(workspace, path, count):
    return start_python(REGISTER, workspace, path, count, stdin=-1)


def whole(workspace):
    """Every version is as it says, and nothing lies beside them."""
    found = list(registry.records(workspace))
    for record in found:
        assert check.changes(registry.files_dir(workspace, record), record) == []
    return found


@pytest.mark.promise("twenty-registrations-once-gets-number")
def test_twenty_concurrent_registrations_of_a_model_get_twenty_versions(workspace, tmp_path):
    write_tree(tmp_path, {f"made/{number % 4}/weights": str(number % 4) * 100_000 for number in range(20)})
    started = [start(workspace, tmp_path / f"made/{number % 4}", 2) for number in range(20)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    given = [int(number) for process in started for number in process.communicate(timeout=300)[0].split()]
    assert [process.returncode for process in started] == [0] * 20
    assert sorted(given) == list(range(1, 41))
    found = whole(workspace)
    assert [record.version for record in found] == list(range(40, 0, -1))
    # The 40 versions have four different contents, and each content is stored only once.
    contents = {os.lstat(registry.files_dir(workspace, one) / one.files[0].name).st_ino for one in found}
    assert len(contents) == 4
    assert len([*(workspace / "models/.blobs").glob("*/*")]) == 4
    assert os.listdir(registry.parts_dir(workspace)) == []


@pytest.mark.promise("twenty-registrations-once-gets-number")
def test_equal_content_of_model_versions_is_stored_once(workspace, tmp_path):
    add(workspace, tmp_path, {"weights": b"w" * 1_000_000})
    before = tree_size(workspace / "models")
    for _ in range(3):
        add(workspace, tmp_path, {"weights": b"w" * 1_000_000})
    assert tree_size(workspace / "models") - before < 50_000
    assert len(whole(workspace)) == 4


@pytest.mark.promise("registration-killed-leaves-version-space")
@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_killed_model_registration_leaves_no_version_and_no_files(workspace, tmp_path, monkeypatch, pause_s):
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(300_000_000)
    process = start(workspace, path, 50)
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()
    wait_until(lambda: registry.parts_dir(workspace).exists(), "a registration has begun")
    time.sleep(pause_s)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=180)
    process.communicate()
    whole(workspace)
    # Simulate that the leftover files are old.
    monkeypatch.setattr(staging, "_FRESH_S", -1.0)
    versions = len([*registry.records(workspace)])
    made = add(workspace, tmp_path, {"weights": b"small"})
    assert made.version >= versions + 1
    assert os.listdir(registry.parts_dir(workspace)) == []
    whole(workspace)
    for record in [*registry.records(workspace)]:
        registry.remove(workspace, record)
    # The killed registration may have stored a copy of the file that no version uses. `unneeded` lists this copy too.
    for blob, _ in [*keep.unneeded(registry.blobs_dir(workspace))]:
        keep.drop(blob)
    assert tree_size(workspace / "models") < 10_000


def test_cleanup_does_not_remove_staging_files_of_a_running_model_registration(workspace, monkeypatch):
    monkeypatch.setattr(staging, "_FRESH_S", -1.0)
    parts = registry.parts_dir(workspace)
    with staging.staged(parts) as files:
        write_tree(files, {"a": "1"})
        assert staging.sweep(parts) == 0
        assert (files / "a").exists()
    assert os.listdir(parts) == []


def test_staging_folder_of_another_machine_is_kept_for_an_hour(workspace, monkeypatch):
    """Its locks may not be seen here, so only its age tells."""
    parts = registry.parts_dir(workspace)
    write_tree(parts, {"0000aaaa-1/files/a": "1"})
    monkeypatch.setattr(staging, "_FRESH_S", -1.0)
    assert staging.sweep(parts) == 0
    monkeypatch.setattr(staging, "_ABANDONED_S", -1.0)
    assert staging.sweep(parts) == 1


def test_model_version_folder_without_a_record_is_not_listed_or_replaced(workspace, tmp_path):
    add(workspace, tmp_path, {"a": "1"})
    write_tree(workspace / "models/digits/2/files", {"a": "1"})
    assert registry.versions_of(workspace).versions("digits") == [1]
    assert add(workspace, tmp_path, {"a": "2"}).version == 3, "nobody's folder is replaced"


def test_damaged_model_record_raises_when_loaded_and_is_skipped_when_listed(workspace, tmp_path):
    add(workspace, tmp_path, {"a": "1"})
    (workspace / "models/digits/1/model.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.json' can't be read as a model"):
        registry.load(workspace, "digits")
    assert list(registry.records(workspace)) == []


def test_unknown_keys_of_a_model_record_from_a_newer_paceline_are_ignored(workspace, tmp_path):
    made = add(workspace, tmp_path, {"a": "1"})
    path = workspace / "models/digits/1/model.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "signature": "x", "files": [{**data["files"][0], "chunks": 3}]}))
    assert registry.load(workspace, "digits") == made


def test_removing_a_version_frees_only_unshared_content(workspace, tmp_path):
    first = add(workspace, tmp_path, {"own": b"1" * 1000, "both": b"b" * 5000})
    second = add(workspace, tmp_path, {"own": b"2" * 1000})
    assert registry.remove(workspace, first) == 1000
    with pytest.raises(ModelNotFoundError, match="digits:1 was removed meanwhile"):
        registry.remove(workspace, first)
    assert registry.remove(workspace, second) == 6000
    assert registry.versions_of(workspace).names() == []
    assert add(workspace, tmp_path, {"own": b"3"}).version == 3


def test_equal_models_have_equal_digests(workspace, tmp_path):
    one, other = add(workspace, tmp_path, {"a": "1"}), add(workspace, tmp_path, {"a": "1"}, name="letters")
    assert one.digest == other.digest
    assert add(workspace, tmp_path, {"a": "2"}).digest != one.digest


@pytest.mark.parametrize("name", ["", ".a", "a/b", "../a", "a b", "a:1", "ä", "a\n", "x" * 256, None, 3])
def test_model_name_with_path_separators_or_invalid_characters_is_refused(workspace, tmp_path, name):
    with pytest.raises(ModelError, match=r"the model name .*: give letters, digits"):
        add(workspace, tmp_path, {"a": "1"}, name=name)
    assert not workspace.exists()


def test_unwritable_registry_raises_model_error(workspace, tmp_path, monkeypatch):
    def refused(*given, **values):
        raise PermissionError(13, "Permission denied", "models/.parts")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(ModelError, match=r"model 'digits' can't be registered: Permission denied: 'models/\.parts'\."):
        registry.add(workspace, "digits", sources.ModelSource(top="a", is_folder=False, files=(), label="a"))
