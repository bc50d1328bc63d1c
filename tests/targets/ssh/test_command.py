from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from paceline.errors import TargetError
from paceline.targets.ssh import command
from paceline.targets.ssh.command import Ssh
from paceline.targets.ssh.hosts import SshHost

HOST = SshHost(name="gpu1")


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "sockets_dir", lambda: Path("/run/s"))
    config = tmp_path / "config"
    config.write_text("Host shared*\n  ControlPath ~/.ssh/%C\n")


def options(words: list[str]) -> dict[str, str]:
    pairs = [words[index + 1].partition("=") for index, word in enumerate(words) if word == "-o"]
    return {name: value for name, _, value in pairs}


@pytest.mark.usefixtures("ssh_client")
def test_ssh_command_uses_an_existing_control_master_and_starts_none(tmp_path: Path) -> None:
    words = Ssh(config=str(tmp_path / "config")).words(HOST, ["true"])

    assert words[-3:] == ["--", "gpu1", "true"]
    found = options(words)
    assert (found["ControlMaster"], found["BatchMode"]) == ("no", "yes")
    assert found["ControlPath"].startswith("/run/s/")
    assert "ControlPersist" not in found


@pytest.mark.usefixtures("ssh_client")
def test_ssh_connection_of_a_host_probe_stays_open_and_is_reused_for_the_same_login(tmp_path: Path) -> None:
    ssh, other = Ssh(config=str(tmp_path / "config")), Ssh(config=str(tmp_path / "config"), user="bob")
    found = options(ssh.words(HOST, ["true"], leave_open=True))

    assert found["ControlMaster"] == "auto"
    assert 0 < int(found["ControlPersist"]) <= 60
    assert found["ControlPath"] == options(ssh.words(HOST, ["true"]))["ControlPath"]
    assert found["ControlPath"] != options(other.words(HOST, ["true"]))["ControlPath"]


@pytest.mark.usefixtures("ssh_client")
def test_no_control_path_is_set_if_the_user_has_configured_ssh_connection_sharing(tmp_path: Path) -> None:
    ssh = Ssh(config=str(tmp_path / "config"))

    shared = SshHost(name="shared1")
    assert not {"ControlPath", "ControlMaster"} & set(options(ssh.words(shared, ["true"], leave_open=True)))
    link = options(ssh.words(shared, ["true"]))
    assert "ControlPath" not in link
    assert link["ControlMaster"] == "no", "what is shared must not end with a run"
    assert options(Ssh(options=("ControlPath=/x",)).words(HOST, ["true"]))["ControlPath"] == "/x"


@pytest.mark.usefixtures("ssh_client")
def test_ssh_keepalive_timeout_is_at_least_the_silence_limit_of_the_target() -> None:
    for silence_s, interval in [(1.0, 1), (15.0, 5), (61.0, 21)]:
        found = options(Ssh(silence_s=silence_s).words(HOST, ["true"]))
        assert (int(found["ServerAliveInterval"]), int(found["ServerAliveCountMax"])) == (interval, 3)


@pytest.mark.usefixtures("ssh_client")
def test_ssh_settings_are_passed_as_separate_arguments(tmp_path: Path) -> None:
    ssh = Ssh(
        config=f"{tmp_path}/config", user="al ice", port=2222, identity="/my keys/$id", options=("ProxyJump=a;b",)
    )
    words = ssh.words(SshHost(name="gpu1", user="bob"), [shlex.join(["python3", "-c", "a;b"])])

    assert words[1:7] == ["-F", f"{tmp_path}/config", "-l", "bob", "-p", "2222"]
    assert options(words)["IdentityFile"] == '"/my keys/$id"'
    assert options(words)["ProxyJump"] == "a;b"
    assert words[-1] == "python3 -c 'a;b'"


@pytest.mark.usefixtures("ssh_client")
def test_real_ssh_accepts_the_command_line(tmp_path: Path) -> None:
    words = Ssh(config=str(tmp_path / "config")).words(HOST, [], leave_open=True)
    done = subprocess.run([words[0], "-G", *words[1:]], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "batchmode yes" in done.stdout


def test_missing_ssh_client_raises_target_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match="Install OpenSSH's client"):
        Ssh().words(HOST, ["true"])


def test_ssh_sockets_are_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(command, "_LONGEST_FOLDER", 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    folder = command.sockets_dir()
    assert folder == tmp_path / "paceline-ssh"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert command.sockets_dir() != folder


def test_login_command_for_users_has_all_settings_of_the_target() -> None:
    ssh = Ssh(config="/c", user="bob", port=2222, identity="/k", options=("ProxyJump=gate",))
    words = ssh.login_words(SshHost(name="gpu1", user="alice"))
    assert [words[0], words[-1], words[1:7]] == ["ssh", "gpu1", ["-F", "/c", "-l", "alice", "-p", "2222"]]
    assert options(words) == {"IdentityFile": '"/k"', "IdentitiesOnly": "yes", "ProxyJump": "gate"}
