"""Installed packages, judged from invented facts."""

from __future__ import annotations

import pytest

from paceline.doctor.environment import check_environment, has_module

TORCH = {"version": "2.13.0", "detail": "CUDA 12.8", "gpus": 1}
MPI = {"version": "4.1.2", "detail": "Open MPI v5.0.11"}
OPEN_MPI = {"path": "/usr/bin/mpirun", "version": "5.0"}
MISSING = {"missing": True, "error": "ModuleNotFoundError: No module named 'torch'"}


@pytest.fixture
def judged(examination):
    """Return check -> [(node, level, observation)] for these facts of two nodes."""

    def judge(first, second):
        full = {"modules": {"torch": TORCH, "mpi4py": MPI}, "open_mpi": OPEN_MPI}
        examination.facts = {"node0": {**full, **first}, "node1": {**full, **second}}
        found = {}
        for finding in check_environment(examination):
            found.setdefault(finding.check, []).append((finding.node, finding.level, finding.seen))
        return found

    return judge


def test_equal_package_versions_of_all_nodes_are_reported_in_one_line(judged, examination):
    assert judged({}, {}) == {
        "torch": [(None, "ok", "2.13.0 (CUDA 12.8) on 2 nodes")],
        "mpi4py": [(None, "ok", "4.1.2 (Open MPI v5.0.11) on 2 nodes")],
        "open mpi": [(None, "ok", "Open MPI 5.0 (/usr/bin/mpirun) on 2 nodes")],
    }
    assert has_module(examination, "torch")


@pytest.mark.parametrize(("version", "level"), [("2.12.1", "fail"), ("2.13.1", "warn")])
def test_different_minor_versions_of_torch_fail_and_different_patch_versions_warn(judged, version, level):
    other = {"modules": {"torch": {**TORCH, "version": version}, "mpi4py": MPI}}
    ((node, found, seen),) = judged({}, other)["torch"]
    assert (node, found) == (None, level)
    assert seen == f"differs: 2.13.0 (CUDA 12.8) on node0; {version} (CUDA 12.8) on node1"


def test_package_check_fails_if_some_nodes_lack_a_package_and_is_skipped_if_all_nodes_lack_it(judged, examination):
    without = {"modules": {"torch": MISSING, "mpi4py": MPI}}
    assert judged(without, without)["torch"][0][1] == "skipped"
    found = judged({}, without)["torch"]
    assert [(node, level) for node, level, _ in found] == [("node1", "fail"), (None, "ok")]
    assert not has_module(examination, "torch")


def test_package_with_a_broken_import_fails_with_its_import_error(judged):
    broken = {"missing": False, "error": "ImportError: libcudart.so.12: cannot open shared object file"}
    both = {"modules": {"torch": broken, "mpi4py": MPI}}
    found = judged(both, both)["torch"]
    assert [level for _, level, _ in found] == ["fail", "fail"]
    assert "libcudart.so.12" in found[0][2]


def test_package_check_fails_if_importing_the_packages_times_out(judged):
    both = {"modules": {"error": "python gave no answer in 70 s"}}
    assert judged(both, both)["torch"][0] == ("node0", "fail", "can't be imported: python gave no answer in 70 s")


def test_different_open_mpi_versions_fail_and_different_paths_warn(judged):
    assert judged({}, {"open_mpi": {**OPEN_MPI, "version": "4.1"}})["open mpi"][0][:2] == (None, "fail")
    assert judged({}, {"open_mpi": {**OPEN_MPI, "path": "/opt/mpirun"}})["open mpi"][0][:2] == (None, "warn")
    found = judged({}, {"open_mpi": {"error": "there is no mpirun"}})["open mpi"]
    assert found[0] == ("node1", "fail", "there is no mpirun")
    none = {"open_mpi": {"error": "there is no mpirun"}}
    assert judged(none, none)["open mpi"] == [(None, "skipped", "none: there is no mpirun")]
