"""What each node has: judged from facts that are made up, and once from this machine's own."""

from __future__ import annotations

import os
import sys

import pytest

from paceline.doctor import machine, on_node
from paceline.doctor.machine import (
    check_gpus,
    check_limits,
    check_python,
    check_space,
    check_stacks,
    differing_nodes,
    learn_facts,
)
from tests.doctor.conftest import answers


def facts(**changed):
    full = {"free": 50_000_000_000, "total": 100_000_000_000}
    return {
        "agent_python": "3.11.7",
        "python": {"path": "/usr/bin/python3", "version": "3.11.7"},
        "space": {"/runs": full, "/tmp": full, "/dev/shm": full},
        "stacks": {"ptrace_scope": "0", "may_trace": False, "py_spy": "/bin/py-spy", "refused": ""},
        "limits": {"nofile": 65536, "memlock": None, "nproc": None, "core": 0},
        "gpus": {"devices": [], "has_tool": False},
        "modules": {},
        **changed,
    }


@pytest.fixture
def judged(examination):
    """The findings of a check on these facts of two nodes."""

    def judge(check, first, second=None):
        examination.folder = "/runs"
        examination.facts = {"node0": facts(**first), "node1": facts(**(first if second is None else second))}
        return list(check(examination))

    return judge


def levels(findings):
    return [(finding.node, finding.level) for finding in findings]


def test_doctor_collects_python_version_free_space_limits_packages_and_open_mpi_of_this_machine(
    two, examination, monkeypatch
):
    monkeypatch.setattr(machine, "MODULES", ("json", "no_such_module"))
    examination.patients = examination.patients[:1]
    examination.folder = two[0].folder
    examination.python = sys.executable
    assert list(learn_facts(examination)) == []
    found = examination.facts["node0"]
    assert found["python"]["version"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert found["space"][two[0].folder]["free"] > 0
    assert found["limits"]["nofile"] is None or found["limits"]["nofile"] > 0
    assert found["modules"]["json"]["version"]
    assert found["modules"]["no_such_module"]["missing"]
    assert "version" in found["open_mpi"] or "mpirun" in found["open_mpi"]["error"]
    for check in (check_python, check_space, check_limits):
        assert {finding.level for finding in check(examination)} <= {"ok", "warn"}


def test_doctor_fails_a_node_whose_check_prints_no_result_and_excludes_it_from_later_checks(two, examination):
    two[0].wrong = lambda argv: answers("PACELINE-ANSWERS {}")
    two[1].wrong = lambda argv: answers("no marked line")
    (failed,) = learn_facts(examination)
    assert (failed.node, failed.level) == ("node1", "fail")
    assert list(examination.facts) == ["node0"]


def test_missing_interpreter_is_named_in_the_doctor_report(examination):
    examination.python = "/no such/python; $(x)"
    assert list(learn_facts(examination)) == []
    missing, _ = check_python(examination)
    assert (missing.level, "/no such/python; $(x): No such file" in missing.seen) == ("fail", True)
    assert "--python" in missing.advice


def test_python_3_9_on_a_node_fails_and_minor_versions_that_differ_warn(judged):
    old = {"python": {"path": "/usr/bin/python3", "version": "3.9.2"}}
    found = judged(check_python, {}, old)
    assert levels(found) == [("node0", "ok"), ("node1", "fail"), (None, "warn")]
    assert found[2].seen == "Python differs: 3.11 on node0; 3.9 on node1"
    patch = {"python": {"path": "/usr/bin/python3", "version": "3.11.2"}}
    assert levels(judged(check_python, {}, patch)) == [("node0", "ok"), ("node1", "ok")]


@pytest.mark.parametrize(
    ("path", "free", "total", "level"),
    [
        ("/runs", 100e6, 1e12, "fail"),
        ("/runs", 1e9, 1e12, "warn"),
        ("/runs", 6e9, 1e12, "ok"),
        ("/tmp", 40e6, 1e12, "fail"),
        ("/dev/shm", 60e6, 64e6, "warn"),
        ("/dev/shm", 60e6, 8e9, "ok"),
        ("/dev/shm", 1e6, 8e9, "fail"),
    ],
)
def test_free_space_check_fails_or_warns_at_limits_that_depend_on_the_folder(judged, path, free, total, level):
    space = {**facts()["space"], path: {"free": free, "total": total}}
    findings = judged(check_space, {"space": space}, {})
    (about,) = [finding for finding in findings if finding.node == "node0" and finding.seen.startswith(path)]
    assert (about.level, bool(about.advice)) == (level, level != "ok")


def test_unwritable_folder_fails_the_free_space_check(judged):
    space = {**facts()["space"], "/runs": {"error": "/runs: Permission denied"}}
    assert [finding.seen for finding in judged(check_space, {"space": space}, {}) if finding.level == "fail"] == [
        "/runs: Permission denied"
    ]


@pytest.mark.parametrize(("nofile", "level"), [(128, "fail"), (1024, "warn"), (65536, "ok"), (None, "ok")])
def test_low_open_file_limit_is_reported(judged, nofile, level):
    limits = {"nofile": nofile, "memlock": 8_388_608, "nproc": None, "core": 0}
    assert levels(judged(check_limits, {"limits": limits}))[0] == ("node0", level)


def test_low_locked_memory_limit_is_reported_only_on_nodes_with_infiniband(judged, two):
    limits = {"nofile": 65536, "memlock": 65536, "nproc": None, "core": 0}
    two[1].interfaces = {**two[1].interfaces, "ib0": ("10.0.0.2", 24)}
    found = judged(check_limits, {"limits": limits})
    assert levels(found) == [("node0", "ok"), ("node1", "warn")]
    assert "memlock" in found[1].advice


def test_gpu_check_warns_if_gpus_differ_between_nodes_or_torch_sees_none(judged):
    two_old = {"devices": [["H100", "550.1", "81559"]] * 2, "has_tool": True}
    one_new = {"devices": [["H100", "560.2", "81559"]], "has_tool": True}
    torch = {"torch": {"version": "2.13.0", "gpus": 0}}
    found = judged(check_gpus, {"gpus": two_old}, {"gpus": one_new, "modules": torch})
    assert levels(found) == [("node0", "ok"), ("node1", "warn"), (None, "warn")]
    assert found[0].seen == "2 x H100, driver 550.1"
    assert found[1].seen == "1 x H100, driver 560.2; torch sees 0"
    assert "differs: 2 x H100, driver 550.1 on node0" in found[2].seen


def test_gpu_check_fails_if_nvidia_smi_hangs_and_is_skipped_without_gpus(judged):
    ill = {"devices": [], "has_tool": True, "error": "nvidia-smi gave no answer in 30 s"}
    found = judged(check_gpus, {"gpus": ill}, {})
    assert levels(found) == [("node0", "fail"), ("node1", "skipped")]


def test_report_of_versions_that_differ_between_nodes_names_three_nodes_and_counts_the_rest():
    values = {f"n{number}": "2.1" for number in range(9)} | {"odd": "2.0"}
    assert differing_nodes(values) == "2.1 on n0, n1, n2 and 6 more nodes; 2.0 on odd"


@pytest.mark.promise("doctor-says-node-paceline-stacks")
@pytest.mark.parametrize(
    ("scope", "py_spy", "refused", "seen", "advice"),
    [
        ("0", "/bin/py-spy", "", "by signal, and by py-spy", ""),
        ("", None, "", "by signal; py-spy is not installed", "pip install py-spy"),
        # With ptrace_scope 1, a process may trace only its own children. py-spy still works, because its file has a capability.
        ("1", "/bin/py-spy", "", "by signal, and by py-spy", ""),
        (
            "1",
            "/bin/py-spy",
            "Error: Operation not permitted (os error 1)",
            "by signal alone: kernel.yama.ptrace_scope is 1",
            "sysctl kernel.yama.ptrace_scope=0, or setcap",
        ),
        (
            "1",
            None,
            "",
            "by signal alone: kernel.yama.ptrace_scope is 1",
            "sysctl kernel.yama.ptrace_scope=0, or setcap",
        ),
        (
            "0",
            "/bin/py-spy",
            "Error: Permission Denied: Try running again",
            "by signal alone: py-spy may not look into processes (Error: Permission",
            "In a container, start it with --cap-add SYS_PTRACE",
        ),
        (
            "0",
            "/bin/py-spy",
            "Error: Failed to find",
            "by signal alone: py-spy fails (Error: Failed",
            "pip install --up",
        ),
    ],
)
def test_missing_ptrace_permission_is_reported_with_advice(judged, scope, py_spy, refused, seen, advice):
    told = {"ptrace_scope": scope, "may_trace": False, "py_spy": py_spy, "refused": refused}
    found, _ = judged(check_stacks, {"stacks": told})
    assert found.level == "ok"
    assert found.seen.startswith(seen)
    assert found.advice.startswith(advice)
    assert bool(found.advice) == bool(advice)


@pytest.mark.promise("doctor-says-node-paceline-stacks")
def test_doctor_tests_py_spy_on_another_process_and_reports_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    spy = tmp_path / "py-spy"
    # This fake py-spy checks that its target process exists, and then fails with a message.
    spy.write_text("#!/bin/sh\nfor pid; do :; done\ntest -d /proc/$pid || exit 0\necho no such right >&2\nexit 1\n")
    spy.chmod(0o755)
    assert on_node.stacks(str(python))["refused"] == "no such right"
    spy.write_text("#!/bin/sh\nexit 0\n")
    found = on_node.stacks(str(python))
    assert (found["py_spy"], found["refused"]) == (str(spy), "")
