from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import TargetError
from paceline.targets.ssh import SshTarget
from paceline.targets.ssh.settings import read_settings
from tests.helpers import make_job


def test_host_file_is_read_once_and_stored_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1 slots=2\ngpu2:4\n")
    target = SshTarget("lab", {"hosts": [str(tmp_path / "hosts")], "user": "alice", "port": None})
    (tmp_path / "hosts").unlink()

    assert target.settings == {"hosts": ["gpu1 slots=2", "gpu2 slots=4"], "user": "alice"}
    assert SshTarget("lab", target.settings).settings == target.settings


@pytest.mark.usefixtures("ssh_client")
def test_remote_folder_is_named_after_the_login_user(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host gpu2\n  User carol\n")
    config = {"ssh_config": str(tmp_path / "config")}

    assert read_settings("lab", {"hosts": ["bob@gpu1"], **config}).folder == "/tmp/paceline-bob"
    assert read_settings("lab", {"hosts": ["gpu2"], **config}).folder == "/tmp/paceline-carol"
    assert read_settings("lab", {"hosts": ["gpu1"], "user": "D\\x y/..".replace(" ", ""), **config}).folder == (
        "/tmp/paceline-D_xy_.."
    )
    assert read_settings("lab", {"hosts": ["gpu1"], "folder": "/big/$x y/"}).folder == "/big/$x y"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "needs hosts"),
    ({"hosts": ["a"], "port": 0}, "port=0 is not between 1 and 65535"),
    ({"hosts": ["a"], "user": "-x"}, "not a user's name"),
    ({"hosts": ["a"], "folder": "paceline"}, "not an absolute path"),
    ({"hosts": ["a"], "folder": "/tmp/../etc"}, "not an absolute path"),
    ({"hosts": ["a"], "ssh_option": ["-v"]}, "is not NAME=VALUE"),
    ({"hosts": ["a"], "identity": "/no/key"}, "can't be read"),
    ({"hosts": ["a"], "identity": "/dev/../dev/null/${HOME}"}, "can't be read|variable"),
    ({"hosts": ["a"], "ssh_config": "/no/config"}, "can't be read"),
    ({"hosts": ["a"], "python": "-c"}, "neither a name nor a path"),
    ({"hosts": ["a"], "partition": "gpu"}, "no setting 'partition'"),
]


@pytest.mark.parametrize(("settings", "expected"), BAD)
def test_invalid_ssh_setting_is_refused_with_its_value(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(TargetError, match=expected):
        SshTarget("lab", settings)


def test_more_nodes_than_hosts_are_refused_without_contacting_hosts() -> None:
    target = SshTarget("lab", {"hosts": ["nowhere.invalid"]})
    with pytest.raises(TargetError, match=r"node_count=2, but compute target 'lab' has 1 host \(nowhere.invalid\)"):
        target.check(make_job(node_count=2, distributed_backend="gloo"))


def test_preview_of_a_run_on_ssh_hosts_contacts_no_host() -> None:
    target = SshTarget("lab", {"hosts": ["nowhere.invalid slots=4", "b.invalid", "c.invalid"]})
    job = make_job(node_count=2, process_count_per_node=2, distributed_backend="nccl", use_gpu=True)

    preview = target.preview(job)

    assert [(node.name, node.cores, node.gpus) for node in preview.nodes] == [
        ("nowhere.invalid", 4, ("0", "1")),
        ("b.invalid", 2, ("0", "1")),
    ]
