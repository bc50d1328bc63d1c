"""Files kept by content: their disk space, and their state when other processes write or are killed."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest

from paceline.errors import ModelError
from paceline.models import keep
from paceline.models.sources import ModelSourceFile

LARGE = 3 * keep._CHUNK + 17


@pytest.fixture
def kept(tmp_path):
    """Keep a file of this content, as the next one: (what came of it, its path)."""
    made = []

    def kept(content, path=None):
        source = path or tmp_path / "source"
        if path is None:
            source.write_bytes(content)
        target = tmp_path / "kept" / str(len(made))
        target.parent.mkdir(exist_ok=True)
        made.append(target)
        return keep.keep(ModelSourceFile(name="a", path=source), tmp_path / "blobs", target), target

    return kept


def blobs(tmp_path):
    return sorted((tmp_path / "blobs").glob("*/*"))


@pytest.mark.parametrize("size", [0, 1, keep._CHUNK, LARGE])
def test_equal_content_is_stored_once_and_without_a_link_to_its_source(kept, tmp_path, size):
    content = os.urandom(size)
    first, one = kept(content)
    again, other = kept(content)
    assert first.sha256 == again.sha256 == hashlib.sha256(content).hexdigest()
    assert (first.is_new, again.is_new) == (True, False)
    assert one.read_bytes() == content
    assert os.path.samefile(one, other)
    assert not os.path.samefile(one, tmp_path / "source")
    assert [path.name for path in blobs(tmp_path)] == [first.sha256]
    assert os.lstat(one).st_nlink == 3
    assert os.lstat(one).st_mode & 0o777 == 0o444
    assert keep.sha256_of(one) == first.sha256


def test_content_already_in_the_model_store_is_not_copied_again(kept, monkeypatch):
    content = os.urandom(LARGE)
    kept(content)
    monkeypatch.setattr(keep, "_copy", lambda *given: pytest.fail("it was copied"))
    result, _ = kept(content)
    assert not result.is_new


def test_contents_with_equal_beginning_and_end_are_stored_separately(kept, tmp_path):
    content = bytearray(os.urandom(LARGE))
    kept(content)
    content[keep._SAMPLE + 1] ^= 1
    result, path = kept(content)
    assert result.is_new
    assert path.read_bytes() == content
    assert len(blobs(tmp_path)) == 2


def test_modified_file_in_the_model_store_is_not_reused_by_a_registration(kept, tmp_path):
    content = os.urandom(100_000)
    _, spoilt = kept(content)
    spoilt.chmod(0o644)
    with open(spoilt, "r+b") as file:
        file.seek(70_000)
        file.write(b"spoilt")
    result, path = kept(content)
    assert path.read_bytes() == content
    assert keep.sha256_of(path) == result.sha256


@pytest.mark.promise("content-disk-lost-handed-registration")
@pytest.mark.parametrize("at", [3, LARGE // 2 - keep._SAMPLE], ids=["seen by a sample", "between the samples"])
def test_corrupted_model_file_with_unchanged_size_and_time_is_not_reused_by_a_registration(kept, tmp_path, at):
    """Regression: a registration linked the corrupted file because its size and time were unchanged. Repeating the
    registration linked the corrupted file each time."""
    content = os.urandom(LARGE)
    _, rotten = kept(content)
    rotten.chmod(0o644)
    with open(rotten, "r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    os.utime(rotten, ns=(keep.STAMP_NS, keep.STAMP_NS))
    _, path = kept(content)
    assert path.read_bytes() == content
    _, again = kept(content)
    assert os.path.samefile(path, again)


@pytest.mark.promise("content-disk-lost-handed-registration")
def test_pull_does_not_reuse_a_blob_whose_bytes_have_changed(kept, tmp_path):
    first, rotten = kept(b"weights")
    rotten.chmod(0o644)
    rotten.write_bytes(b"Weights")
    os.utime(rotten, ns=(keep.STAMP_NS, keep.STAMP_NS))
    assert not keep.take(tmp_path / "blobs", 7, first.sha256, tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_model_files_are_copied_if_hard_links_fail(kept, tmp_path, monkeypatch, number):
    def refused(*given, **values):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refused)
    content = b"weights"
    for _ in range(2):
        result, path = kept(content)
        assert (path.read_bytes(), result.is_new) == (content, True)
    assert blobs(tmp_path) == []


def test_content_of_another_user_that_cannot_be_linked_is_copied(kept, tmp_path, monkeypatch):
    """As Linux has it (protected_hardlinks) in a workspace that several users share."""
    link = os.link
    monkeypatch.setattr(os, "geteuid", lambda: 4711)

    def refused(source, target, **values):
        if "-4711" not in f"{source}{target}" and blobs(tmp_path)[:1] == [source]:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        link(source, target, **values)

    kept(b"weights")
    monkeypatch.setattr(os, "link", refused)
    (_, mine), (_, again) = kept(b"weights"), kept(b"weights")
    assert os.path.samefile(mine, again)
    assert [path.name[64:] for path in blobs(tmp_path)] == ["", "-4711"]
    mine.unlink()
    again.unlink()
    assert keep.drop(blobs(tmp_path)[0]) == 7, "the other user's is a version's"


def test_model_source_that_changes_while_it_is_copied_is_copied_again(kept, tmp_path, monkeypatch):
    pump, times = keep._pump, []

    def meanwhile(*given):
        result = pump(*given)
        if len(times) < 2:
            (tmp_path / "source").write_bytes(b"changed" * (1 + len(times)))
        times.append(1)
        return result

    monkeypatch.setattr(keep, "_clone", lambda *given: False)
    monkeypatch.setattr(keep, "_pump", meanwhile)
    result, path = kept(b"weights")
    assert path.read_bytes() == b"changedchanged"
    assert result.sha256 == hashlib.sha256(b"changedchanged").hexdigest()
    assert len(times) == 3


def test_source_that_keeps_changing_is_named_in_the_error(kept, tmp_path, monkeypatch):
    stamps = iter(range(100))
    monkeypatch.setattr(keep, "stamp_of", lambda fd: next(stamps))
    with pytest.raises(ModelError, match=r"source' changed each of 3 times it was read\. Register it once"):
        kept(b"weights")
    assert os.listdir(tmp_path / "kept") == []


def test_registering_a_model_on_a_full_disk_leaves_no_partial_copy(kept, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(keep, "_clone", lambda *given: False)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        kept(b"weights")
    monkeypatch.undo()
    assert os.listdir(tmp_path / "kept") == []
    assert blobs(tmp_path) == []


def test_model_source_file_replaced_by_a_pipe_raises_without_blocking(kept, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no longer a file"):
        kept(b"", tmp_path / "pipe")


def test_model_store_removes_only_content_that_no_version_links(kept, tmp_path):
    _, one = kept(b"a" * 10)
    _, other = kept(b"b" * 10)
    one.unlink()
    found = dict(keep.unneeded(tmp_path / "blobs"))
    assert list(found.values()) == [10]
    assert [keep.drop(path) for path in blobs(tmp_path)].count(10) == 1
    assert other.read_bytes() == b"b" * 10
    assert len(blobs(tmp_path)) == 1
    other.unlink()
    assert keep.drop(blobs(tmp_path)[0]) == 10
    assert os.listdir(tmp_path / "blobs") == []


def test_model_file_is_cloned_if_the_file_system_supports_it(kept, monkeypatch):
    """On any file system: here a copy does the work of a clone, and the hash is that of the clone."""

    def clone(fd, out):
        os.write(out, b"cloned")
        os.lseek(out, 0, os.SEEK_SET)
        return True

    monkeypatch.setattr(keep, "_clone", clone)
    result, path = kept(b"weights")
    assert path.read_bytes() == b"cloned"
    assert result.sha256 == hashlib.sha256(b"cloned").hexdigest()
