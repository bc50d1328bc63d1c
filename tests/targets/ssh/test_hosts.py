from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import TargetError
from paceline.targets.ssh.hosts import SshHost, check_user, read_hosts

LISTS = {
    "gpu1 slots=4\ngpu2 slots=2 max_slots=8\n": ["gpu1 slots=4", "gpu2 slots=2"],
    "gpu1:4\n\n# the slow one\ngpu2:2   # in the cellar\n": ["gpu1 slots=4", "gpu2 slots=2"],
    "alice@gpu1\nbob@gpu2:8\n": ["alice@gpu1", "bob@gpu2 slots=8"],
    "10.0.0.7\n[2001:db8::7]:2\n2001:db8::8 slots=1\n": ["10.0.0.7", "2001:db8::7 slots=2", "2001:db8::8 slots=1"],
    # Open MPI adds up the slots of a host that is named twice.
    "gpu1\ngpu1\ngpu2 slots=2\ngpu2 slots=3\n": ["gpu1 slots=2", "gpu2 slots=5"],
}


@pytest.mark.parametrize("text", LISTS)
def test_host_files_with_slot_counts_comments_users_and_ip_addresses_are_parsed(text: str, tmp_path: Path) -> None:
    (tmp_path / "my hosts").write_text(text)

    found = read_hosts([str(tmp_path / "my hosts")])

    assert [str(host) for host in found] == LISTS[text]
    assert read_hosts([str(host) for host in found]) == found, "as they are kept"


def test_host_list_accepts_names_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("gpu9\n")
    monkeypatch.chdir(tmp_path)

    assert read_hosts(["gpu1:2,gpu2", "gpu3 slots=1", "hosts.txt"]) == (
        SshHost(name="gpu1", slots=2),
        SshHost(name="gpu2"),
        SshHost(name="gpu3", slots=1),
        SshHost(name="gpu9"),
    )


def test_password_in_a_list_of_hosts_is_refused_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    for text in ("me:s3cr3t@gpu1", "gpu2,me:s3cr3t@gpu1:4", "gpu2:4 me:s3cr3t #@gpu1"):
        file.write_text(f"gpu0\n{text}\n")
        for items in ([text], [str(file)]):
            with pytest.raises(TargetError, match="a password is in it, which is not shown") as caught:
                read_hosts(items)
            assert "s3cr3t" not in str(caught.value)
    assert [str(one) for one in read_hosts(["gpu1:4,alice@gpu2:2", "fe80::1%eth0,alice@gpu3"])][-1] == "alice@gpu3"


BAD = [
    *(
        "-oProxyCommand=sh",
        "a;b",
        "a b",
        "$(id)",
        "a`id`",
        "gpu1:",
        "gpu1:x",
        "gpu1:0",
        "gpu1 slots=-1",
        "gpu1 slots=²",
    ),
    *(
        "gpu1 cpus=4",
        "gpu1:2 slots=2",
        "-l@gpu1",
        "a b@c",
        "a'@gpu1",
        "@",
        "[::1",
        "[::1]x",
        "gpu1 slots=",
        "|x",
        "héé",
    ),
]


@pytest.mark.parametrize("line", BAD)
def test_invalid_host_line_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"good\n{line}\n")

    with pytest.raises(TargetError) as caught:
        read_hosts([str(tmp_path / "hosts")])

    assert f"{tmp_path}/hosts, line 2" in str(caught.value)
    assert repr(line) in str(caught.value) or line in str(caught.value)


def test_host_with_two_users_is_refused() -> None:
    with pytest.raises(TargetError, match="'alice@gpu1' and as 'gpu1'"):
        read_hosts(["alice@gpu1", "gpu1"])


@pytest.mark.parametrize("items", [[], ["# nobody"], [""], ["/no/such/file"], ["no_such_file.txt"]])
def test_empty_host_list_is_refused(items: list[str]) -> None:
    with pytest.raises(TargetError, match=r"names no host|can't be read"):
        read_hosts(items)


def test_binary_host_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    with pytest.raises(TargetError, match="can't be read"):
        read_hosts([str(tmp_path / "hosts")])


@pytest.mark.parametrize("user", ["", "-x", "a b", "a;b", "$x", "a\nb", "a\\"])
def test_user_name_with_shell_characters_is_refused(user: str) -> None:
    with pytest.raises(TargetError, match="not a user's name"):
        check_user(user, "user")
    assert check_user("DOMAIN\\alice", "user") == "DOMAIN\\alice"
