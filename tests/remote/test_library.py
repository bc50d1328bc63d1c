"""The one list, hash and archive of the library that is sent to machines without it."""

import io
import os
import time
import zipfile

import pytest

from paceline.remote import library
from paceline.remote.agent import boot
from paceline.remote.library import library_digest, library_files, packed_library


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "lib" / "paceline"
    (package / "system").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "system" / "files.py").write_text("x = 1\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "files.pyc").write_bytes(b"\0")
    return package.parent


def test_what_is_sent_is_what_is_hashed_and_unpacked(folder, tmp_path):
    assert list(library_files(folder)) == ["paceline/__init__.py", "paceline/system/files.py"]
    data = packed_library(folder)
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == list(library_files(folder))
    boot.unpack(data, str(tmp_path / "there"), library_digest(folder))
    assert boot.digest(str(tmp_path / "there" / "paceline")) == library_digest(folder)


def test_the_same_files_give_the_same_bytes(folder, tmp_path):
    first = packed_library(folder)
    library._packed.cache_clear()
    (folder / "paceline" / "__init__.py").touch()
    assert packed_library(folder) == first


def test_the_hash_is_that_of_when_it_was_first_asked(folder):
    first = library_digest(folder)
    (folder / "paceline" / "__init__.py").write_text("another version")
    assert library_digest(folder) == first


def test_what_is_kept_of_a_hash_holds_until_a_file_is_another_one(folder, monkeypatch):
    monkeypatch.setattr(boot, "_STEADY_S", -60.0)  # these files are new
    file = folder / "paceline" / "system" / "files.py"
    first, about = boot.known_digest(str(folder)), file.stat()
    monkeypatch.setattr(boot, "digest", lambda package: "made again")
    assert boot.known_digest(str(folder)) == first

    time.sleep(0.05)  # the kernel's clock for files goes on every few milliseconds
    file.write_text("x = 2\n")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert boot.known_digest(str(folder)) == "made again"


def test_of_files_that_may_change_yet_without_a_trace_no_hash_is_kept(folder):
    boot.known_digest(str(folder))
    assert [path.name for path in folder.iterdir()] == ["paceline"]


def test_nothing_is_written_into_an_installation(folder, monkeypatch):
    monkeypatch.setattr(boot, "_STEADY_S", -60.0)
    library_digest(folder)
    assert [path.name for path in folder.iterdir()] == ["paceline"]
