"""What a run's snapshot leaves out, and which of it the working folder links to."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from paceline.snapshot import scan as scanning
from paceline.snapshot.scan import scan
from paceline.system import linked


def left(top: Path, *opened: str, wanted: str = "", out: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return path -> why of what is not copied; "-" stands before the reason where it is not linked either."""
    tree = scan(top, top / "none", top.parent / "ws", out, frozenset(opened), frozenset({wanted} - {""}))
    found = {one.path: f"{'' if one.is_linked else '-'}{one.why}" for one in tree.not_copied}
    assert not found.keys() & (tree.files.keys() | tree.links.keys() | set(tree.directories))
    return found


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name in ("train.py", "data/x.txt", "data/y.txt", "out/a.pt", "runs/1/b.pt"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "project"


def git(top: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=top, check=True, capture_output=True)


def test_ignored_folder_is_linked_and_results_are_left_out(top: Path) -> None:
    (top / ".gitignore").write_text("/data\nout/\n")
    assert left(top) == {
        "data": "ignored by '/data' in .gitignore",
        "out": "-results of earlier runs",
        "runs": "-results of earlier runs",
    }
    assert left(top, wanted="out")["out"] == "ignored by 'out/' in .gitignore"


def test_file_that_git_tracks_is_copied_though_a_pattern_names_it(top: Path) -> None:
    (top / ".gitignore").write_text("data/\nruns/\n")
    git(top, "init", "-q")
    git(top, "add", "-f", "data/x.txt", "runs/1/b.pt")
    assert left(top) == {"data/y.txt": "ignored by 'data/' in .gitignore", "out": "-results of earlier runs"}


def test_byte_order_mark_and_the_repositorys_own_list_are_read(top: Path) -> None:
    (top / ".gitignore").write_bytes(b"\xef\xbb\xbf/data\n")
    git(top, "init", "-q")
    (top / ".git" / "info" / "exclude").write_text("*.secret\n!keep.secret")
    for name in ("a.secret", "keep.secret"):
        (top / name).touch()
    found = left(top)
    assert found["data"] == "ignored by '/data' in .gitignore"
    assert "a.secret" in found
    assert "keep.secret" not in found


def test_script_and_working_folder_are_copied_though_a_pattern_names_them(top: Path) -> None:
    (top / ".gitignore").write_text("/data\n")
    assert "data" not in left(top, "data", "data/x.txt")


def test_links_out_sockets_and_unreadable_files_are_linked(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / "big").symlink_to("/usr")
    monkeypatch.chdir(top)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    (top / ".env").write_text("A=1")
    found = left(top, out=(top / ".env",))
    assert found["big"] == "a link to /usr"
    assert found["socket"] == "neither a file, a folder nor a link"
    assert found[".env"] == "its values are secrets"


def test_large_file_and_folder_of_many_files_are_linked(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(top / "weights.bin", "wb") as file:
        file.truncate(scanning._DATA_BYTES + 1)
    monkeypatch.setattr(scanning, "MAX_FILES", 4)
    for number in range(5):
        (top / f"data/{number}.txt").touch()
    found = left(top)
    assert found["weights.bin"] == "too large to copy"
    assert found["data"] == "more than 4 files"


def test_tracked_files_are_copied_beyond_the_limits_and_the_largest_others_linked(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "MAX_FILES", 3)
    git(top, "init", "-q")
    git(top, "add", "-f", "train.py", "out", "runs")
    assert left(top) == {"data": "too large to copy"}
    git(top, "add", "-f", ".")
    assert left(top) == {}


def test_hidden_folders_outside_a_repository_are_linked(top: Path) -> None:
    (top / ".cache").mkdir()
    assert left(top)[".cache"] == "a hidden folder"
    git(top, "init", "-q")
    assert ".cache" not in left(top)


def test_numbers_sizes_and_times_are_kept(top: Path, tmp_path: Path) -> None:
    os.utime(top / "data/y.txt", ns=(1, 2**61))
    (one,) = linked.measured(top, [linked.NotCopied(path="data", why="it is data", is_linked=True, is_folder=True)])
    assert (one.files, one.size, one.changed_ns, one.is_whole) == (2, 20, 2**61, True)
    assert linked.line([one]) == "Not copied, linked in place: data/ (2 files, 20 B; it is data)"
    linked.write(tmp_path / "linked.json", [one])
    assert linked.read(tmp_path / "linked.json") == [one]
    (tmp_path / "linked.json").write_text('{"not_copied": [{"path": "x", "of": 1}]}')
    assert linked.read(tmp_path / "linked.json") == []


def test_virtual_environment_is_linked_and_not_counted(top: Path) -> None:
    (top / ".gitignore").write_text(".venv\n")
    for name in (".venv", "env"):
        (top / name).mkdir()
        (top / name / "pyvenv.cfg").touch()
    found = left(top)
    assert (found[".venv"], found["env"]) == ("a virtual environment", "a virtual environment")
    listed = linked.measured(top, [linked.NotCopied(path="env", why=found["env"], is_linked=True, is_folder=True)])
    assert (str(listed[0]), linked.line(listed)) == ("env/ (a virtual environment)", None)


SECRETS = (
    *(
        ".env",
        ".env.local",
        "prod.env",
        ".netrc",
        "id_ed25519",
        "tls/server.key",
        "conf/credentials.json",
        "secrets.toml",
    ),
    *(".ssh/config", "token"),
)


@pytest.mark.parametrize("repository", ["none", "own", "above", "amlignore"])
def test_secrets_that_git_does_not_track_are_linked_and_named_first(top: Path, repository: str) -> None:
    # They were copied into the snapshot without a word, and kept there.
    for name in (*SECRETS, "secrets.py", "key.py", "tracked.pem"):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text("x")
    if repository != "none":
        git(top.parent if repository == "above" else top, "init", "-q")
        git(top, "add", "-f", "tracked.pem", "train.py")
    if repository == "amlignore":
        (top / ".amlignore").write_text("none\n")
    found = left(top)
    linked_in_place = {name for name, why in found.items() if why == linked.SECRET}
    tracked = {"tracked.pem"} if repository == "none" else set()
    hidden = {".ssh"}
    assert linked_in_place == {name for name in SECRETS if not name.startswith(".ssh/")} | hidden | tracked
    tree = scan(top, top / "none", top.parent / "ws", (), frozenset())
    said = (
        linked.line(linked.measured(top, [*tree.not_copied, linked.NotCopied(path="d", why="x", is_linked=True)])) or ""
    )
    assert said.startswith("Not copied, linked in place: ")
    assert f"1 B; {linked.SECRET})" in said
