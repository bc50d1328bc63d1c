"""What of this machine pip is given in a container. Installing is tested in real containers, in tests/engines."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from paceline.containers import (
    ContainerEngine,
    Mount,
    all_layers,
    ensure_layer,
    hold_layer,
    key_of,
    layer,
    prune_layers,
)
from paceline.containers.layer import named_files
from paceline.errors import EnvironmentBuildError
from tests.containers import fakes
from tests.helpers import write_tree

#: This fake container client writes the list of installed packages to the path where the real container would write it.
#: The file `$0.runs` has a line for each call.
INSTALLS = """\
echo run >> "$0.runs"
printf '%s\\n' "$@" > "$0.argv"
while [ $# -gt 0 ]; do
  case "$1" in */installed.json) echo '{"packages": ["tiny==1.0"]}' > "$1";; esac
  shift
done
"""
FAILS = """\
echo "ERROR: Could not find a version that satisfies the requirement nothing (from versions: none)"
echo "ERROR: No matching distribution found for nothing"
exit 1
"""


@pytest.fixture
def ensure(tmp_path):
    def ensure(text, *lines, **values):
        engine = ContainerEngine(kind="podman", path=str(fakes.program(tmp_path, "podman", text)), version="5")
        given = {"run_id": "r_1", "python": "python3", "say": print, "environment": {"HOME": str(tmp_path / "home")}}
        return ensure_layer(tmp_path / "images", engine, "sha", requirements=lines, **(given | values))

    return ensure


def runs(tmp_path):
    return len((tmp_path / "podman.runs").read_text().splitlines())


def test_equal_packages_share_a_package_layer(ensure, tmp_path):
    first = ensure(INSTALLS, "tiny")
    assert first.packages == ("tiny==1.0",)
    assert ensure(INSTALLS, "tiny") == first
    assert runs(tmp_path) == 1
    assert ensure(INSTALLS, "tiny", python="/usr/bin/python3.12") != first
    assert ensure(INSTALLS, "tiny", is_exact=True) != first
    assert runs(tmp_path) == 3


def test_changed_local_wheel_makes_a_new_package_layer(ensure, tmp_path):
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    wheel.write_text("one")
    first = ensure(INSTALLS, str(wheel))
    wheel.write_text("another")
    assert ensure(INSTALLS, str(wheel)) != first


def test_change_at_the_start_of_a_large_file_of_a_local_package_is_detected(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    seen = set()
    for first in (b"a", b"b"):
        (project / "weights.bin").write_bytes(first + bytes(5 << 20))
        seen.add(str(layer._states([str(project)])))
    assert len(seen) == 2
    assert "weights.bin" in seen.pop()


def test_failed_pip_install_is_reported_and_keeps_no_package_layer(ensure, tmp_path):
    with pytest.raises(EnvironmentBuildError) as caught:
        ensure(FAILS, "nothing")
    assert "No matching distribution found for nothing: Could not find a version" in str(caught.value)
    assert not list((tmp_path / "images").glob("*.json"))
    assert ensure(INSTALLS, "nothing").packages == ("tiny==1.0",)


def test_leftovers_of_an_interrupted_package_layer_install_are_removed(ensure, tmp_path):
    first = ensure(INSTALLS, "tiny")
    left = write_tree(Path(first.prefix).parent / "11111111", {"half": "written"})
    (tmp_path / "images" / f"{left.parent.name}.json").write_text('{"prefix": "cut sho')
    assert ensure(INSTALLS, "tiny") == first
    assert runs(tmp_path) == 2
    assert not left.exists()


def test_package_layer_whose_recorded_path_has_changed_is_rebuilt(ensure, tmp_path):
    first = ensure(INSTALLS, "tiny")
    path = tmp_path / "images" / f"{Path(first.prefix).parent.name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prefix": "/elsewhere/x/y"}))
    assert ensure(INSTALLS, "tiny") == first
    assert runs(tmp_path) == 2


def test_two_nodes_build_the_same_package_layer_at_the_same_path(ensure, tmp_path):
    # Regression: mpirun uses one interpreter path for all nodes. But the nodes built the layer under different names,
    # because the wheel that Paceline had sent had another modification time on each node.
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    wheel.write_text("one")
    first = ensure(INSTALLS, str(wheel))
    argv = (tmp_path / "podman.argv").read_text()
    found = re.search(
        rf"source=({re.escape(str(Path(first.prefix).parent))}/[0-9a-f]{{8}}),target={first.prefix}\n", argv
    )
    assert found, "made in a folder of the try's own, which its container sees at the last one's path"
    assert not Path(found[1]).exists()
    assert (Path(first.prefix) / "installed.json").exists()
    (tmp_path / "images").rename(tmp_path / "of another node")
    os.utime(wheel, (1, 1))
    assert ensure(INSTALLS, str(wheel)) == first
    assert runs(tmp_path) == 2


def test_unwritable_package_layer_folder_raises_environment_build_error(ensure, tmp_path):
    (tmp_path / "images").write_text("a file in the way")
    with pytest.raises(
        EnvironmentBuildError, match=r"could not be installed on top of the image: File exists: '.*images'"
    ):
        ensure(INSTALLS, "tiny")


def test_wheels_named_by_requirements_are_mounted_read_only_and_editable_projects_writable(tmp_path):
    top = write_tree(tmp_path, {"x y.whl": "", "w/z.whl": "", "p/pyproject.toml": "", "c.txt": ""})

    def seen(text):
        return list(named_files(text))

    assert seen(f"tiny @ file://{top}/x%20y.whl#sha256=0") == [Mount(path=top / "x y.whl", read_only=True)]
    assert seen(f"--find-links={top}/w") == [Mount(path=top / "w", read_only=True)]
    assert seen(f"-e {top}/p") == [Mount(path=top / "p")]
    assert seen(f"-c {top}/c.txt") == [Mount(path=top / "c.txt", read_only=True)]
    assert seen("einops>=0.8 https://example.org/usr/x.whl relative/x.whl") == []


def test_system_folders_of_the_host_are_never_mounted():
    assert list(named_files("/ /usr /usr/lib /etc /tmp /proc/self /dev/null /lib /home /var")) == []


@pytest.fixture
def images(tmp_path):
    """A folder with two complete ones, the second used last, and what a killed installation has left."""
    folder = tmp_path / "images"
    for number, key in enumerate(("a" * 20, "b" * 20)):
        prefix = folder / key / "0123"
        prefix.mkdir(parents=True)
        made = {"prefix": str(prefix), "python": "", "bin_dir": "", "packages": [f"x=={number}"]}
        (folder / f"{key}.json").write_text(json.dumps(made))
        (folder / f"{key}.lock").touch()
        os.utime(folder / f"{key}.lock", (1000 + number, 1000 + number))
    (folder / ("c" * 20) / "4567").mkdir(parents=True)
    return folder


def test_complete_package_layers_are_listed_by_last_use(images):
    found = all_layers(images)
    assert [(kept.key, kept.layer.packages, kept.used_at) for kept in found] == [
        ("b" * 20, ("x==1",), 1001.0),
        ("a" * 20, ("x==0",), 1000.0),
    ]
    assert [key_of(kept.layer) for kept in found] == ["b" * 20, "a" * 20]


def test_missing_images_folder_lists_no_package_layers(tmp_path):
    assert all_layers(tmp_path / "images") == []
    assert prune_layers(tmp_path / "images") == []


def test_package_layer_in_use_survives_prune_and_gets_a_new_time_of_last_use(images):
    with hold_layer(images, "a" * 20):
        assert [kept.key for kept in prune_layers(images)] == ["b" * 20]
        assert [kept.key for kept in all_layers(images)] == ["a" * 20]
        assert all_layers(images)[0].used_at > 1e9
    assert not (images / ("b" * 20)).exists()
    assert prune_layers(images, unused_for_s=3600) == []
    assert [kept.key for kept in prune_layers(images)] == ["a" * 20]
    assert not (images / ("c" * 20)).exists(), "what a killed installation has left is gone too"


def test_dry_run_of_a_prune_removes_no_package_layer(images):
    assert len(prune_layers(images, dry_run=True)) == 2
    assert len(all_layers(images)) == 2


def test_using_a_pruned_package_layer_raises_environment_build_error(images):
    """Regression: another process pruned the environment after it was built, but before the run had locked it. The run
    used the missing environment."""
    prune_layers(images, only=["a" * 20])
    with (
        pytest.raises(EnvironmentBuildError, match=f"environment {'a' * 20} has just been pruned"),
        hold_layer(images, "a" * 20),
    ):
        pass
    assert not (images / ("a" * 20)).exists()


def test_package_layer_used_after_listing_survives_prune(images, monkeypatch):
    def use_first(path):
        if path.stem == "a" * 20:
            with hold_layer(images, path.stem):
                pass
        return locks_take(path)

    locks_take = layer.locks.take
    monkeypatch.setattr(layer.locks, "take", use_first)
    assert prune_layers(images, unused_for_s=3600, only=["a" * 20]) == []
    assert len(all_layers(images)) == 2
