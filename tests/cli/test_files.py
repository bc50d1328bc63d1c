"""files, download: what a run has left, shown and copied."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from paceline.cli import files
from paceline.runs import downloads
from paceline.runs.folder import RunFolder
from tests.cli.conftest import Gallery


def test_files_command_lists_the_name_and_size_of_each_file_of_a_run(gallery: Gallery) -> None:
    done = gallery("files", gallery.good)
    assert [line.split() for line in done.stdout.splitlines()][-1] == ["5", "B", "outputs/model.txt"]
    assert "3 files" in done.stderr
    assert gallery.json("files", gallery.good, "*.txt") == [{"name": "outputs/model.txt", "size_bytes": 5}]


def test_download_skips_equal_files_and_replaces_changed_files_only_with_overwrite(gallery: Gallery, tmp_path) -> None:
    words = ("download", gallery.good, "outputs", "--to", tmp_path / "to")
    assert gallery(*words).stdout == f"1 file, 5 B, copied to {tmp_path / 'to'}.\n"
    copy = tmp_path / "to/outputs/model.txt"
    assert copy.read_text() == "model"
    assert "1 there already" in gallery(*words).stdout
    copy.write_text("mine")
    assert "--overwrite" in gallery(*words, code=1).stderr
    assert copy.read_text() == "mine"
    (found,) = gallery.json(*words, "--overwrite")
    assert found == {"name": "outputs/model.txt", "path": str(copy), "size_bytes": 5}
    assert copy.read_text() == "model"


def test_download_folder_is_named_after_the_run_by_default(gallery: Gallery, tmp_path) -> None:
    gallery("download", gallery.bad, cwd=tmp_path, env={"PACELINE_WORKSPACE": str(gallery.folder / ".paceline")})
    assert (tmp_path / gallery.bad / "logs/rank_1.log").read_text().endswith("ValueError: bad batch\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["files", "{run}", "nope.pt"], "has no file 'nope.pt'. Its files: "),
        (["download", "{run}", "nope/*"], "has no file 'nope/*'"),
        (["download"], "Missing argument 'RUN'"),
        (["download", "no_such"], "no run 'no_such'"),
        (["download", "{run}", "--to", "src/train.py"], "can't be written"),
    ],
)
def test_invalid_files_or_download_call_is_refused(gallery: Gallery, words: list[str], complaint: str) -> None:
    assert complaint in gallery(*(word.format(run=gallery.good) for word in words), code=2).stderr


def test_download_with_json_does_not_list_a_file_that_was_removed_before_it_was_copied(
    gallery, tmp_path, monkeypatch, capsys
):
    """Regression: `paceline download --json` listed the path of a copy that it had not made, because the original was
    gone."""
    folder = RunFolder(gallery.run_folder(gallery.good))
    chosen = downloads.files(folder)
    gone = dataclasses.replace(chosen[0], name="outputs/gone.pt", path=folder.outputs / "gone.pt")
    monkeypatch.setenv("PACELINE_WORKSPACE", str(gallery.folder / ".paceline"))
    monkeypatch.setattr(downloads, "files", lambda folder, patterns: [gone, *chosen])
    for count in (3, 3):  # in the second round the files exist already
        files.download(run_id=gallery.good, names=[], to=tmp_path / "to", overwrite=False, as_json=True)
        listed = json.loads(capsys.readouterr().out)
        assert [one["name"] for one in listed] == [file.name for file in chosen]
        assert sum(Path(one["path"]).is_file() for one in listed) == count
