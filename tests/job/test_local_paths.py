"""Requirements that name something on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.job.local_paths import is_editable, local_path


@pytest.mark.parametrize(
    ("text", "path", "extras", "tail"),
    [
        ("/a/b", "/a/b", "", ""),
        ("/a/b[x,y]", "/a/b", "[x,y]", ""),
        ("/a/b ; python_version > '3'", "/a/b", "", " ; python_version > '3'"),
        ("/a/b-1.whl --hash=sha256:00", "/a/b-1.whl", "", " --hash=sha256:00"),
        ("file:///a%20b/c", "/a b/c", "", ""),
        ("FILE:///a", "/a", "", ""),
        ("-e/a", "/a", "", ""),
        ("--editable=/a", "/a", "", ""),
        ("/a/[odd]/b", "/a/[odd]/b", "", ""),
    ],
)
def test_local_requirement_is_split_into_path_extras_and_remaining_text(text, path, extras, tail):
    found = local_path(text)
    assert found is not None
    assert (found.path, found.extras, found.tail) == (Path(path), extras, tail)
    assert found.is_editable is is_editable(text)
    # Both texts that are made from the parsed path must be parsed as the same path again.
    for again in (str(found), found.line()):
        assert local_path(again) == found


@pytest.mark.parametrize(
    "text",
    [
        *("name", "name==1", "name[x]", "name; python_version>'3'", "https://h/a.whl", "git+ssh://git@h/r.git"),
        *("n @ https://h/a.whl", "-e git+https://h/r.git", "file:///${PLACE}/x.whl", "--pre"),
    ],
)
def test_local_path_returns_none_for_a_requirement_by_name_or_remote_url(text):
    assert local_path(text) is None


def test_local_path_for_pip_and_uv_is_percent_encoded():
    for text, line in (
        ("/a b/c#d", "file:///a%20b/c%23d"),
        ("-e /a b", "-e file:///a%20b"),
        ("/a b[x]", "file:///a%20b[x]"),
        ("/ä/b", "file:///%C3%A4/b"),
        ("n @ file:///a%20b", "n @ file:///a%20b"),
        ("-e /a/b", "-e /a/b"),
    ):
        found = local_path(text)
        assert found is not None
        assert found.line() == line


def test_local_path_is_found_in_a_given_folder_if_the_working_directory_is_missing(tmp_path, monkeypatch):
    (tmp_path / "folder" / "pkg").mkdir(parents=True)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    # Regression: a missing working directory caused an error, although the package was in the given folder.
    found = local_path("./pkg", tmp_path / "folder")
    assert found is not None
    assert found.path == tmp_path / "folder" / "pkg"
