"""Files that a run's snapshot leaves out, and the links to some of them in the working folder."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from paceline.snapshot import scan as scanning
from paceline.snapshot.scan import scan
from paceline.system import linked
from paceline.system.files import write_json
from tests.helpers import write_tree


def left(top: Path, *opened: str, wanted: str = "", out: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return path -> reason of the files that are not copied; "-" before the reason if there is no link either."""
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


@pytest.mark.promise("run-does-copy-linked-place")
def test_ignored_data_folder_is_linked_but_result_folders_are_not(top: Path) -> None:
    (top / ".gitignore").write_text("/data\nout/\n")
    assert left(top) == {
        "data": "ignored by '/data' in .gitignore",
        "out": "-results of earlier runs",
        "runs": "-results of earlier runs",
    }
    assert left(top, wanted="out")["out"] == "ignored by 'out/' in .gitignore"


def test_tracked_file_is_copied_despite_an_ignore_pattern(top: Path) -> None:
    (top / ".gitignore").write_text("data/\nruns/\n")
    git(top, "init", "-q")
    git(top, "add", "-f", "data/x.txt", "runs/1/b.pt")
    assert left(top) == {"data/y.txt": "ignored by 'data/' in .gitignore", "out": "-results of earlier runs"}


def test_gitignore_with_a_bom_and_git_info_exclude_are_read(top: Path) -> None:
    (top / ".gitignore").write_bytes(b"\xef\xbb\xbf/data\n")
    git(top, "init", "-q")
    (top / ".git" / "info" / "exclude").write_text("*.secret\n!keep.secret")
    for name in ("a.secret", "keep.secret"):
        (top / name).touch()
    found = left(top)
    assert found["data"] == "ignored by '/data' in .gitignore"
    assert "a.secret" in found
    assert "keep.secret" not in found


def test_script_and_working_folder_are_copied_despite_ignore_patterns(top: Path) -> None:
    (top / ".gitignore").write_text("/data\n")
    assert "data" not in left(top, "data", "data/x.txt")


@pytest.mark.parametrize("kept_by", ["script", "git"])
def test_ignored_folder_copied_for_one_run_is_linked_again_from_the_next(top: Path, kept_by: str) -> None:
    (top / ".gitignore").write_text("data/\n")
    cache = top.parent / "cache.json"

    def scanned(*opened: str) -> scanning.Tree:
        tree = scan(top, cache, top.parent / "ws", opened=frozenset(opened))
        tree.hashes |= dict.fromkeys(tree.files, "hash")
        write_json(cache, tree.to_cache("id"))
        return tree

    if kept_by == "git":
        git(top, "init", "-q")
        git(top, "add", "-f", "data")
    for _ in range(2):
        assert "data/x.txt" in scanned("data", "data/x.txt").files
    if kept_by == "git":
        git(top, "rm", "-r", "-q", "--cached", "data")
    tree = scanned("train.py")
    assert "data" in {one.path for one in tree.not_copied}
    assert "data" not in tree.directories


@pytest.mark.promise("run-does-copy-linked-place")
def test_symlinks_to_other_folders_sockets_and_env_files_with_secrets_are_not_copied_to_a_snapshot(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "big").symlink_to("/usr")
    monkeypatch.chdir(top)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    (top / ".env").write_text("A=1")
    found = left(top, out=(top / ".env",))
    assert found["big"] == "a link to /usr"
    assert found["socket"] == "neither a file, a folder nor a link"
    assert found[".env"] == "its values are secrets"


def test_large_files_and_folders_of_many_files_are_not_copied_into_a_snapshot(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(top / "weights.bin", "wb") as file:
        file.truncate(scanning._DATA_BYTES + 1)
    monkeypatch.setattr(scanning, "MAX_FILES", 4)
    for number in range(5):
        (top / f"data/{number}.txt").touch()
    found = left(top)
    assert found["weights.bin"] == "too large to copy"
    assert found["data"] == "more than 4 files"


@pytest.mark.promise("run-does-copy-linked-place")
def test_tracked_files_are_copied_beyond_the_limits_and_large_untracked_folders_are_linked(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "MAX_FILES", 3)
    git(top, "init", "-q")
    git(top, "add", "-f", "train.py", "out", "runs")
    assert left(top) == {"data": "too large to copy"}
    git(top, "add", "-f", ".")
    assert left(top) == {}


def test_snapshot_links_hidden_folders_only_if_the_source_directory_is_in_no_git_repository(top: Path) -> None:
    (top / ".cache").mkdir()
    assert left(top)[".cache"] == "a hidden folder"
    git(top, "init", "-q")
    assert ".cache" not in left(top)


def test_file_count_size_and_time_of_uncopied_folders_are_stored(top: Path, tmp_path: Path) -> None:
    os.utime(top / "data/y.txt", ns=(1, 2**61))
    (one,) = linked.measured(top, [linked.NotCopied(path="data", why="it is data", is_linked=True, is_folder=True)])
    assert (one.files, one.size, one.changed_ns, one.is_whole) == (2, 20, 2**61, True)
    assert linked.lines([one]) == ["Not copied, linked in place: data/ (2 files, 20 B; it is data)"]
    linked.write(tmp_path / "linked.json", [one])
    assert linked.read(tmp_path / "linked.json") == [one]
    (tmp_path / "linked.json").write_text('{"not_copied": [{"path": "x", "of": 1}]}')
    assert linked.read(tmp_path / "linked.json") == []


def test_ignored_virtual_environment_is_linked_without_counting_its_files(top: Path) -> None:
    (top / ".gitignore").write_text(".venv\n")
    for name in (".venv", "env"):
        (top / name).mkdir()
        (top / name / "pyvenv.cfg").touch()
    found = left(top)
    assert (found[".venv"], found["env"]) == ("a virtual environment", "a virtual environment")
    listed = linked.measured(top, [linked.NotCopied(path="env", why=found["env"], is_linked=True, is_folder=True)])
    assert (str(listed[0]), linked.lines(listed)) == ("env/ (a virtual environment)", [])


ONE = {"path": "data", "why": "ignored", "is_linked": True}


@pytest.mark.promise("list-linked-names-somebody-else")
@pytest.mark.parametrize(
    "forged",
    [
        *(
            {"path": path}
            for path in ("../other", "a/../../b", "/etc/passwd", ".", "", "a//b", "./a", "a\0b", 3, None, ["a"])
        ),
        {"why": 1},
        {"is_linked": "yes"},
        {"is_folder": 1},
        {"files": True},
        {"size": "1"},
        {"is_sent": "no"},
        {"kept_back": None},
        {"path": "a/.."},
    ],
    ids=str,
)
def test_forged_path_in_the_list_of_uncopied_files_is_refused(tmp_path: Path, forged: dict[str, object]) -> None:
    """A member of a group's workspace can write such a file: its names are linked to, and sent from, the user's folders."""
    write_json(tmp_path / "linked.json", {"not_copied": [ONE, {**ONE, **forged}]})
    assert linked.read(tmp_path / "linked.json") == []


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"not_copied": {"a": 1}}', '{"not_copied": [3]}', '{"not_copied": [{}]}']
)
def test_damaged_list_of_uncopied_files_reads_as_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "linked.json").write_text(text)
    assert linked.read(tmp_path / "linked.json") == []


def test_list_of_uncopied_files_with_an_unknown_field_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "linked.json", {"not_copied": [{**ONE, "colour": "red"}]})
    assert linked.read(tmp_path / "linked.json") == [linked.NotCopied(path="data", why="ignored", is_linked=True)]


def sent(
    top: Path, *send: str, limit: int | None = None, monkeypatch: pytest.MonkeyPatch | None = None
) -> dict[str, str]:
    """Return files that are not copied -> "" if sent, else the reason why not."""
    if limit is not None and monkeypatch is not None:
        monkeypatch.setattr(linked, "SEND_BYTES", limit)
    tree = scan(top, top / ".none", top / ".ws", (), frozenset(), frozenset(send))
    found = linked.with_sent(top, linked.measured(top, tree.not_copied), send)
    assert all(one.is_sent != bool(one.kept_back) for one in found)
    return {one.path: one.kept_back for one in found}


@pytest.mark.promise("machines-do-see-project-data")
def test_ignored_secrets_results_environments_and_hidden_folders_are_not_sent_by_default(top: Path) -> None:
    ignored = {".env": "K=1", "prod.env": "K=1", "id_rsa": "", "secrets/a.txt": "", "deploy.pem": "", ".cache/a": ""}
    ignored |= {
        "node_modules/a/a.js": "",
        "env/pyvenv.cfg": "",
        "wandb/a": "",
        "outputs/a.pt": "",
        "nested/outputs/a": "",
    }
    write_tree(top, ignored)
    git(top, "init", "-q")
    (top / ".gitignore").write_text("\n".join({"/data", "/nested", *(f"/{name.split('/')[0]}" for name in ignored)}))
    found = sent(top)
    assert {name for name, why in found.items() if not why} == {"data", "nested"}
    # Files with these names are left out of a sent folder too.
    assert dict(linked.sent_files(top, "nested", named=False)) == {}
    write_tree(
        top / "data", {".env": "", "sub/.git/config": "", "sub/.cache/a": "", "sub/a.bin": "", "kaggle.json": ""}
    )
    assert {name for name, _ in linked.sent_files(top, "data", named=False)} == {"x.txt", "y.txt", "sub/a.bin"}
    # If users name a folder, it is sent without the secrets, repositories and environments below it.
    assert {name for name, _ in linked.sent_files(top, "data", named=True)} == {
        "x.txt",
        "y.txt",
        "sub/a.bin",
        "sub/.cache/a",
    }
    for name in (".env", ".cache", "nested/outputs", "wandb"):
        assert sent(top, name)[name] == "", name


def test_uncopied_data_is_sent_smallest_first_up_to_the_size_limit(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(top, {"small/a": "a" * 10, "large/a": "a" * 100, "large/part/a": "a" * 50, "middle.bin": "a" * 60})
    (top / ".gitignore").write_text("/data\nsmall\n/large\nmiddle.bin\n")
    git(top, "init", "-q")
    found = sent(top, limit=100, monkeypatch=monkeypatch)
    assert {name: found[name] for name in ("data", "small", "middle.bin", "large")} == {
        "data": "",
        "small": "",
        "middle.bin": "",
        "large": linked.TOO_MUCH,
    }
    assert sent(top, "large")["large"] == ""
    found = sent(top, "large/part")
    assert (found["large"], found["large/part"]) == (linked.TOO_MUCH, "")


def test_folder_with_too_many_ignored_files_is_sent_only_if_named(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(top, "init", "-q")
    (top / ".gitignore").write_text("/data\n")
    monkeypatch.setattr(linked, "_COUNTED", 1)
    assert sent(top)["data"] == linked.TOO_MUCH
    assert sent(top, "data")["data"] == ""


def test_submission_lists_uncopied_files_and_the_option_that_sends_them() -> None:
    big = linked.NotCopied(
        path="a b", why="ignored", is_linked=True, is_folder=True, size=5 * 10**9, kept_back=linked.TOO_MUCH
    )
    small = linked.NotCopied(path="data", why="ignored", is_linked=True, is_folder=True, files=2, size=20, is_sent=True)
    key = linked.NotCopied(path="a.pem", why="ignored", is_linked=True, kept_back="its name is that of a secret")
    first, second = linked.lines([big, small, key], "..")
    assert first == "Not copied, linked on machines that see it, sent to others: data/ (2 files, 20 B; ignored)"
    assert second.startswith("Not sent to machines that do not see it (more than 1 GB or 10,000 files in all): a b/ (")
    assert "To send it: --send '../a b', or put it into a datastore" in second
    assert linked.text_of(small).endswith("; sent where it is not seen")
    assert linked.text_of(key).endswith("; not sent: its name is that of a secret")


@pytest.mark.parametrize("kind", ["folder", "link to a folder", "file", "link to nothing"])
def test_outputs_of_earlier_runs_are_never_linked_into_a_new_run(top: Path, tmp_path: Path, kind: str) -> None:
    """A run would write its own into the user's folder."""
    if kind == "folder":
        (top / "outputs").mkdir()
    elif kind == "file":
        (top / "outputs").touch()
    else:
        (top / "outputs").symlink_to(tmp_path if "folder" in kind else "nowhere")
    assert left(top)["outputs"] == "-results of earlier runs"
    assert left(top, wanted="outputs")["outputs"] == "-results of earlier runs"


def test_size_of_an_ignored_symlink_to_a_folder_counts_the_files_of_the_folder(top: Path, tmp_path: Path) -> None:
    (top / "away").symlink_to(write_tree(tmp_path / "mnt", {"a": "123"}))
    (top / ".gitignore").write_text("away\n")
    tree = scan(top, top / "none", top.parent / "ws", (), frozenset())
    (one,) = linked.measured(top, [one for one in tree.not_copied if one.path == "away"])
    assert (one.is_folder, one.files, one.size) == (True, 1, 3)


def test_exceeding_the_file_count_limit_in_one_folder_does_not_stop_the_count_in_the_next(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked, "_COUNTED", 2)
    write_tree(top, {f"many/{number}": "" for number in range(3)})
    names = [linked.NotCopied(path=name, why="ignored", is_linked=True, is_folder=True) for name in ("many", "data")]
    assert [(one.files, one.is_whole) for one in linked.measured(top, names)] == [(3, True), (2, True)]


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


@pytest.mark.promise("snapshot-holds-file-secret-s")
@pytest.mark.parametrize("repository", ["none", "own", "above", "amlignore"])
def test_untracked_secrets_are_linked_and_listed_first(top: Path, repository: str) -> None:
    # Regression: untracked files with secrets were copied into the snapshot without a message, and stayed there.
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
    (said,) = linked.lines(
        linked.measured(top, [*tree.not_copied, linked.NotCopied(path="d", why="x", is_linked=True)])
    )
    assert said.startswith("Not copied, linked in place: ")
    assert f"1 B; {linked.SECRET})" in said
