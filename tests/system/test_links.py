"""The targets of links among a run's files; none leads out of the run."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from paceline.system import links
from paceline.system.links import Entry, entries, find, open_below, target_in
from tests.helpers import write_tree


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A run's folder, which is reached through a link itself."""
    (tmp_path / "real").mkdir()
    (tmp_path / "way").symlink_to("real")
    found = tmp_path / "way" / "run"
    files = {"outputs/step/a": "1", "checkpoints/9.pt": "nine", "work/d/w": "w", "uploads/o/x": "x", "uploads/p/y": "y"}
    return write_tree(found, {**files, "state.json": "{}", "attempts/1/rank_0.log": "line", "logs/driver.log": ""})


def link(top: Path, name: str, target: str | Path) -> None:
    (top / name).parent.mkdir(parents=True, exist_ok=True)
    (top / name).symlink_to(target)


def told(top: Path, start: str, *, follow: bool = False) -> dict[str, str]:
    """Return name -> kind, in a word or two."""
    return {
        entry.name: (entry.target and f"-> {entry.target}") or entry.why or f"{entry.kind} {entry.real}"
        for entry in entries(str(top), start, follow=follow)
    }


# Link -> (its target, its kind if links may stay, its kind if links may not stay).
LINKS = {
    "outputs/latest": ("step", "-> step", "dir outputs/step"),
    "outputs/deep/er": ("../step/a", "-> ../step/a", "file outputs/step/a"),
    "outputs/abs": ("TOP/outputs/step", "-> step", "dir outputs/step"),
    "outputs/round/about": ("../step/../../checkpoints/9.pt", "-> ../../checkpoints/9.pt", "file checkpoints/9.pt"),
    "outputs/all": ("../checkpoints", "-> ../checkpoints", "dir checkpoints"),
    "outputs/w": ("../work/d/w", "file work/d/w", "file work/d/w"),
    "outputs/other": ("../uploads/o/x", "file uploads/o/x", "file uploads/o/x"),
    "uploads/o/mine": ("x", "-> x", "file uploads/o/x"),
    "uploads/o/theirs": ("../p/y", "file uploads/p/y", "file uploads/p/y"),
    "uploads/o/best": ("../../checkpoints/9.pt", "-> ../../checkpoints/9.pt", "file checkpoints/9.pt"),
    "work/again": ("d", "-> d", "dir work/d"),
    "logs/rank_0.log": ("../attempts/1/rank_0.log", "file attempts/1/rank_0.log", "file attempts/1/rank_0.log"),
}


@pytest.mark.parametrize("name", LINKS)
def test_symlink_of_a_run_is_listed_as_a_link_or_followed_on_request(top: Path, name: str) -> None:
    target, stays, followed = LINKS[name]
    link(top, name, target.replace("TOP", str(top)))
    assert told(top, name.split("/", maxsplit=1)[0])[name] == stays
    assert told(top, name.split("/", maxsplit=1)[0], follow=True)[name] == followed


OUT = "a link that leads out of the run, to"
LEFT = {
    "/etc": f"{OUT} '/etc'",
    "../../..": f"{OUT} '../../..'",
    "../state.json": f"{OUT} '../state.json'",
    "..": f"{OUT} '..'",
    "../logs/driver.log": f"{OUT} '../logs/driver.log'",
    "/nowhere/at/all": f"{OUT} '/nowhere/at/all'",
    "gone": "a link to 'gone', where there is nothing",
    "x": "a link to 'x', which leads in a circle",
    "pipe": "a link to 'pipe', a pipe",
}


@pytest.mark.promise("link-counts-leads-none-leads")
@pytest.mark.parametrize("target", LEFT)
@pytest.mark.parametrize("follow", [False, True])
def test_symlinks_that_are_broken_or_lead_out_of_the_run_are_excluded(top: Path, target: str, follow: bool) -> None:
    os.mkfifo(top / "outputs/pipe")
    link(top, "outputs/x", target)
    found = told(top, "outputs", follow=follow)
    assert (found["outputs/x"], found["outputs/pipe"]) == (LEFT[target], "a pipe")


def test_chain_of_symlinks_is_resolved_to_its_final_target(top: Path) -> None:
    link(top, "outputs/one", "two")
    link(top, "outputs/two", "../checkpoints/9.pt")
    link(top, "outputs/out", "hop")
    link(top, "outputs/hop", "/etc/passwd")
    found = told(top, "outputs")
    assert (found["outputs/one"], found["outputs/out"]) == ("-> ../checkpoints/9.pt", f"{OUT} 'hop'")


def test_symlinked_folder_is_walked_once_and_a_symlink_loop_is_reported(top: Path) -> None:
    link(top, "work/d/up", "../../work")
    link(top, "outputs/work", "../work")
    assert told(top, "outputs") == {
        "outputs": "dir outputs",
        "outputs/step": "dir outputs/step",
        "outputs/step/a": "file outputs/step/a",
        "outputs/work": "dir work",
        "outputs/work/d": "dir work/d",
        "outputs/work/d/w": "file work/d/w",
        "outputs/work/d/up": "a link to '../../work', a folder that it lies in",
    }
    link(top, "outputs/self", ".")
    assert told(top, "outputs")["outputs/self"] == "-> ."
    assert "a folder that it lies in" in told(top, "outputs", follow=True)["outputs/self"]


@pytest.mark.parametrize(("target", "what"), [("/etc", f"{OUT} '/etc'"), ("checkpoints", "dir checkpoints")])
def test_top_folder_that_is_a_link_is_reported_as_a_link(top: Path, target: str, what: str) -> None:
    link(top, "artifacts", target)
    assert told(top, "artifacts")["artifacts"] == what


def test_unreadable_folder_is_excluded_and_reported_by_name(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        if path.endswith("step"):
            raise PermissionError(13, "Permission denied", path)
        return sorted(one.name for one in os.scandir(path))

    monkeypatch.setattr(links.os, "listdir", refuse)
    assert told(top, "outputs")["outputs/step"] == "a folder that can't be read: Permission denied"


@pytest.mark.parametrize(
    ("name", "target", "made"),
    [
        ("outputs/a", "b", "b"),
        ("outputs/a", "./b/../c", "c"),
        ("outputs/d/a", "../../checkpoints/x", "../../checkpoints/x"),
        ("logs/rank_0.log", "../attempts/1/rank_0.log", "../attempts/1/rank_0.log"),
        ("outputs/a", "/etc", None),
        ("outputs/a", "../../x", None),
        ("outputs/a", "../state.json", None),
        ("outputs/a", "../snapshot/x", None),
        ("outputs/a/b/c/d", "e/../../../../../x", None),
        ("logs/rank_0.log", "../outputs/x", None),
        ("metrics/x", "../outputs/x", None),
        ("outputs", "checkpoints", None),
        ("outputs/a", "b\0", None),
    ],
)
def test_received_symlink_target_inside_the_run_is_normalized_and_an_outside_one_refused(
    name: str, target: str, made: str | None
) -> None:
    assert target_in(name, target) == made


def test_chain_of_received_symlinks_resolves_to_a_path_inside_the_run(top: Path) -> None:
    # By its text this link stays inside the run. But `hop` is a link, so this link would lead four folders up from checkpoints.
    for name, target in {"outputs/a/b/hop": "../../../checkpoints", "outputs/a/b/l": "hop/../../../outputs/x"}.items():
        made = target_in(name, target)
        assert made is not None
        link(top, name, made)
    real = os.path.realpath(top / "outputs/a/b/l")
    assert real == os.path.realpath(top) + "/outputs/outputs/x"


def test_find_follows_symlinks_inside_the_run_and_excludes_symlinks_out_of_the_run(top: Path) -> None:
    link(top, "outputs/latest", "step")
    link(top, "outputs/esc", "/etc")
    assert find(str(top), "outputs/latest/a") == Entry("outputs/latest/a", "file", real="outputs/step/a")
    assert find(str(top), "outputs/nothing") is None
    for name in ("outputs/esc", "outputs/esc/passwd"):
        found = find(str(top), name)
        assert found is not None
        assert found.kind == "left"


@pytest.mark.parametrize("swapped", ["outputs/step/a", "outputs/step", "outputs"])
def test_file_swapped_for_a_symlink_is_not_opened(top: Path, tmp_path: Path, swapped: str) -> None:
    write_tree(tmp_path / "out", {"a": "secret", "step/a": "secret"})
    with open(open_below(str(top), "outputs/step/a")) as file:
        assert file.read() == "1"
    (top / swapped).rename(tmp_path / "old")
    (top / swapped).symlink_to(tmp_path / "out" / swapped.removeprefix("outputs").strip("/"))
    assert (top / "outputs/step/a").read_text() == "secret"
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        open_below(str(top), "outputs/step/a")


def test_pipe_in_place_of_a_file_raises_without_blocking(top: Path) -> None:
    os.mkfifo(top / "outputs/pipe")
    with pytest.raises(OSError, match="no file any more"):
        open_below(str(top), "outputs/pipe")


def test_source_of_the_links_module_is_valid_python_3_6_for_old_login_hosts() -> None:
    text = Path(links.__file__).read_text()
    assert "__future__" not in text
    ast.parse(text, feature_version=(3, 6))
