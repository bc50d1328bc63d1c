"""Named JSON documents of a workspace, with and without versions, written by many at once."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from paceline.system.names import name_rule
from paceline.system.registry import Documents, VersionFolders, Versions

RULE = name_rule("_-", 8)

ADD_MANY = """
import sys
from pathlib import Path
from paceline.system.names import name_rule
from paceline.system.registry import Versions
registry = Versions(Path(sys.argv[1]), name_rule("_-", 8))
for number in range(int(sys.argv[3])):
    with registry.locked():
        print(registry.add("mine", lambda version: [version, sys.argv[2]]), flush=True)
"""


@pytest.fixture
def documents(tmp_path):
    return Documents(tmp_path / "documents", RULE)


def test_registry_document_is_written_with_the_given_file_mode(tmp_path):
    private = Documents(tmp_path, RULE, mode=0o600)
    private.put("key", "secret")
    assert private.path("key").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def registry(tmp_path):
    return Versions(tmp_path / "versions", RULE)


def add(registry, name="mine", make=lambda version: {"number": version}):
    with registry.locked():
        return registry.add(name, make)


@pytest.mark.parametrize("name", ["a", "7", "a_-b", "a-", "12345678"])
def test_valid_names_match_the_name_rule(name):
    assert RULE.fullmatch(name)


@pytest.mark.parametrize("name", ["", "_a", "-a", ".a", "a b", "a/b", "a\n", "ä", "123456789"])
def test_invalid_names_do_not_match_the_name_rule(name):
    assert not RULE.fullmatch(name)


def test_name_rule_can_forbid_characters_at_the_end():
    rule = name_rule("_. -", 8, last="_-")
    assert rule.fullmatch("a .b-")
    assert not rule.fullmatch("a.")
    assert not rule.fullmatch("a ")


def test_registry_documents_are_added_replaced_listed_and_removed_by_name(documents):
    assert (documents.names(), documents.read("a")) == ([], None)
    documents.add("b", {"x": 1})
    documents.add("a", [2])
    documents.put("b", {"x": 3})
    (documents.folder / "not a name.json").write_text("{}")
    (documents.folder / ".default").write_text("a")
    assert documents.names() == ["a", "b"]
    assert (documents.read("a"), documents.read("b")) == ([2], {"x": 3})
    documents.remove("a")
    documents.remove("a")
    assert documents.names() == ["b"]


# Test a file system with hard links (None), and file systems that refuse hard links with one of these errors.
@pytest.mark.parametrize("code", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_second_registry_document_of_the_same_name_is_refused(documents, monkeypatch, code):
    if code is not None:
        monkeypatch.setattr(os, "link", lambda *args, **options: (_ for _ in ()).throw(OSError(code, "no links")))
    documents.add("a", 1)
    with pytest.raises(FileExistsError):
        documents.add("a", 2)
    assert documents.read("a") == 1
    assert sorted(set(os.listdir(documents.folder)) - {".lock"}) == ["a.json"]


def test_hard_link_whose_reply_was_lost_is_treated_as_created(documents, monkeypatch):
    link = os.link

    def twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    documents.add("a", 1)
    assert documents.read("a") == 1


def test_failed_hard_link_raises_and_leaves_no_file(documents, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        documents.add("a", 1)
    assert os.listdir(documents.folder) == []


def test_registry_versions_of_each_name_count_from_1(registry):
    assert [add(registry), add(registry), add(registry, "other")] == [1, 2, 1]
    assert (registry.names(), registry.versions("mine")) == (["mine", "other"], [1, 2])
    assert registry.read("mine", 2) == {"number": 2}
    assert registry.versions("none") == []


@pytest.mark.promise("dataset-s-version-number-never")
def test_version_number_of_a_removed_registry_version_is_not_reused(registry):
    add(registry)
    add(registry)
    registry.of("mine").path("2").unlink()  # a user removed the file by hand
    assert add(registry) == 3
    (registry.of("mine").folder / "3.files.json").write_text("[]")
    with registry.locked():
        registry.remove("mine")
    assert (registry.names(), os.listdir(registry.of("mine").folder)) == ([], [".last"])
    assert add(registry) == 4


def test_registry_without_a_counter_file_continues_after_its_highest_version(registry):
    folder = registry.of("mine").folder
    folder.mkdir(parents=True)
    (folder / "7.json").write_text(json.dumps({"number": 7}))
    assert add(registry) == 8


def test_registry_writers_without_a_shared_lock_get_distinct_version_numbers(registry, monkeypatch):
    # Another machine takes the number between the check and the hard link.
    def make(version):
        if version == 1:
            registry.of("mine").add("1", "theirs")
        return "mine"

    assert add(registry, make=make) == 2
    assert [registry.read("mine", number) for number in (1, 2)] == ["theirs", "mine"]


def test_concurrent_and_killed_writers_leave_complete_documents(registry):
    registry.folder.mkdir()
    command = [sys.executable, "-c", ADD_MANY, str(registry.folder)]
    endless = subprocess.Popen([*command, "killed", "100000"], stdout=subprocess.PIPE, text=True)
    assert endless.stdout.readline() == "1\n"
    others = [subprocess.Popen([*command, str(who), "5"], stdout=subprocess.PIPE, text=True) for who in range(3)]
    endless.send_signal(signal.SIGKILL)
    told = [int(line) for process in others for line in process.communicate(timeout=180)[0].split()]
    endless.communicate(timeout=180)
    assert len(set(told)) == 15
    for version in registry.versions("mine"):
        assert registry.read("mine", version)[0] == version
    assert add(registry) == max(registry.versions("mine"))


# --- versions that are folders


@pytest.fixture
def folders(tmp_path):
    return VersionFolders(tmp_path / "versions", RULE, "it.json")


def add_folder(folders, tmp_path, content="a"):
    made = tmp_path / "made"
    made.mkdir()
    (made / "file").write_text(content)
    with folders.locked():
        return folders.add_folder("mine", made, lambda version: {"number": version})


def test_added_folder_becomes_the_next_version_with_its_document(folders, tmp_path):
    assert [add_folder(folders, tmp_path, text) for text in "ab"] == [1, 2]
    assert not (tmp_path / "made").exists()
    assert folders.names() == ["mine"]
    assert (folders.versions("mine"), folders.read("mine", 2)) == ([1, 2], {"number": 2})
    assert (folders.path("mine", 2) / "file").read_text() == "b"


def test_registered_folder_never_replaces_the_folder_of_another_writer(folders, tmp_path):
    """As on a file system whose locks hold within one machine only."""
    other = folders.path("mine", 1)
    other.mkdir(parents=True)
    (other / "file").write_text("theirs")
    assert add_folder(folders, tmp_path) == 2
    assert (other / "file").read_text() == "theirs"
    assert folders.versions("mine") == [2], "one without a document is none"


def test_version_number_of_a_removed_folder_is_not_reused(folders, tmp_path):
    add_folder(folders, tmp_path)
    folders.take_away("mine", 1, tmp_path / "away")
    assert (tmp_path / "away/file").read_text() == "a"
    assert folders.names() == []
    assert add_folder(folders, tmp_path) == 2
