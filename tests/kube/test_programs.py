"""`make kube` says what a machine lacks and how to get it."""

from __future__ import annotations

import pytest

from tests.kube import programs


def test_check_of_make_kube_names_missing_programs_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(programs.shutil, "which", lambda name: None if name in ("go", "ctr", "runc") else name)
    lacking = programs.missing()
    assert lacking is not None
    root, go, packages = lacking.split("; ")
    assert root.startswith("root: run this as root")
    assert go == "Go 1.25 or later (this machine has none): https://go.dev/dl"
    assert packages == "Debian's packages: apt-get install containerd runc"


def test_check_of_make_kube_names_a_go_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_go_version", lambda: (1, 19))
    assert "Go 1.25 or later (this machine has 1.19)" in (programs.missing() or "")


def test_check_of_make_kube_names_a_missing_kernel_feature_and_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if programs.shutil.which("unshare") is None or programs.os.geteuid() != 0:
        pytest.skip("needs root and unshare")
    monkeypatch.setattr(programs, "_go_version", lambda: programs._GO_VERSION)
    monkeypatch.setattr(programs, "_NEEDED", {})
    monkeypatch.setattr(programs, "_PROBES", {"overlay mounts": "echo no overlay >&2; false"})
    assert (programs.missing() or "").startswith("overlay mounts (no overlay): use a machine")


def test_check_of_make_kube_returns_a_special_exit_code_if_a_requirement_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "missing", lambda: "root")
    assert programs.main() == programs.LACKING
    assert "`make kube` needs root" in capsys.readouterr().err
