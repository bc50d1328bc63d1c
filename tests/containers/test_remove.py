from __future__ import annotations

from paceline.containers import ContainerEngine, remove
from tests.containers import fakes

#: A fake engine that lists two containers until they are removed: one with the run's label, and one without any label.
FAKE = """\
echo "$@" >> "$0.asked"
test -e "$0.gone" && exit 0
case "$*" in
  *--quiet*label=paceline.run=r_1*) echo aaa;;
  *--external*) echo "aaa paceline-r_1-1-0"; echo "bbb paceline-r_1-1-1"; echo "ccc paceline-r_10-1-0"; echo "ddd mine";;
  rm*) touch "$0.gone";;
esac
"""


def test_a_runs_containers_are_removed_and_no_others(tmp_path):
    program = fakes.program(tmp_path, "podman", FAKE)
    assert remove(ContainerEngine(kind="podman", path=str(program), version="4"), "r_1") == 2
    asked = (tmp_path / "podman.asked").read_text().splitlines()
    assert "rm --force --volumes --time=0 aaa bbb" in asked


def test_container_removal_is_repeated_until_the_runtime_has_deleted_it(tmp_path):
    # Regression: on a busy machine, the runtime could not delete a killed container at once, so the container's state
    # stayed below /run.
    runtime = fakes.program(
        tmp_path,
        "runtime",
        """\
        case "$1" in
          delete) echo "$3" >> "$0.asked";;
          state) test "$(grep -c "$2" "$0.asked")" -lt 2 && echo '{}' || exit 1;;
        esac
        """,
    )
    told = f'  *inspect*) echo "{runtime}";;\nesac\n'
    program = fakes.program(tmp_path, "podman", FAKE.replace("esac\n", told))
    assert remove(ContainerEngine(kind="podman", path=str(program), version="4"), "r_1") == 2
    assert (tmp_path / "runtime.asked").read_text().split() == ["aaa", "aaa", "bbb", "bbb"]


def test_container_that_docker_lists_only_at_the_second_query_is_removed_too(tmp_path):
    late = FAKE.replace("test -e", '[ "$(wc -l < "$0.asked")" -lt 2 ] && exit 0\ntest -e', 1)
    program = fakes.program(tmp_path, "docker", late)
    assert remove(ContainerEngine(kind="docker", path=str(program), version="27"), "r_1") == 1
    assert "rm --force --volumes aaa" in (tmp_path / "docker.asked").read_text().splitlines()


def test_failing_or_missing_engine_removes_no_containers_and_raises_nothing(tmp_path):
    broken = fakes.program(tmp_path, "podman", "exit 125")
    assert remove(ContainerEngine(kind="podman", path=str(broken), version="4"), "r_1") == 0
    assert remove(ContainerEngine(kind="docker", path="/nowhere/docker", version="4"), "r_1") == 0


def test_apptainer_has_no_containers_to_remove(tmp_path):
    assert remove(ContainerEngine(kind="apptainer", path="/nowhere/apptainer", version="1"), "r_1") == 0
