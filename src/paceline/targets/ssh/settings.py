"""The settings of a compute target of kind `ssh`."""

from __future__ import annotations

import getpass
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.errors import TargetError
from paceline.targets.options import PRICES, SILENCE, Option, SettingValues, check_settings
from paceline.targets.ssh.command import Ssh
from paceline.targets.ssh.hosts import SshHost, check_user, read_hosts

KIND = "ssh"
OPTIONS = (
    Option(
        "hosts",
        "a host, 'gpu1 slots=4' or 'alice@gpu1:4', several with commas, or a file with a host a line",
        list,
        is_required=True,
    ),
    Option("user", "name to log in as, for hosts whose line has none"),
    Option("port", "where sshd listens, if not as ~/.ssh/config has it", int),
    Option("identity", "private key to log in with, and no other", Path),
    Option("ssh_config", "configuration of ssh in place of ~/.ssh/config", Path),
    Option("ssh_option", "as for `ssh -o`, such as 'ProxyJump=gate'", list),
    Option(
        "python",
        "Python 3.10 or later on the hosts, by name or path; default: the submitting one for scripts, where "
        "all hosts have it at the same place, else python3",
    ),
    Option("folder", "on the hosts, for runs, snapshots and the library; default: /tmp/paceline-USER"),
    Option("interface", "network interface over which nodes talk to each other, such as ib0; default: as ssh arrives"),
    SILENCE,
    *PRICES,
)
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*\s*[= ]\s*\S.*")


@dataclass(frozen=True, kw_only=True)
class SshSettings:
    """The checked settings of one `ssh` target.

    Attributes:
        folder: Absolute path of Paceline's folder, the same on each node.
        python: The interpreter that the user has set, or None.
    """

    hosts: tuple[SshHost, ...]
    ssh: Ssh
    python: str | None
    folder: str
    interface: str | None
    #: The settings as the run stores them: the list of hosts has replaced the name of the file with the hosts.
    plain: dict[str, Any]

    @property
    def own_python(self) -> str:
        """The interpreter that runs Paceline's own programs on the hosts."""
        return self.python or "python3"


def read_settings(name: str, given: SettingValues) -> SshSettings:
    """Return the checked settings of an `ssh` target.

    Raises:
        TargetError: A setting is wrong; the message has the value, the rule and the next step.
    """
    values = check_settings(KIND, OPTIONS, given, name)
    title = f"compute target {name!r}"
    hosts = read_hosts(values["hosts"])
    if values["user"] is not None:
        check_user(values["user"], f"{title}: user")
    port = values["port"]
    if port is not None and not 0 < port < 65536:
        raise TargetError(f"{title}: port={port} is not between 1 and 65535.")
    for option in values["ssh_option"] or []:
        if not _OPTION.fullmatch(option):
            raise TargetError(f"{title}: ssh_option={option!r} is not NAME=VALUE, such as 'ProxyJump=gate'.")
    for key in ("identity", "ssh_config"):
        if values[key] is not None and not os.access(values[key], os.R_OK):
            raise TargetError(f"{title}: {key}={values[key]!r} can't be read. Give the path of a file that is there.")
    if "${" in (values["identity"] or ""):
        raise TargetError(f"{title}: identity={values['identity']!r} has '${{', which ssh takes for a variable.")
    if values["python"] is not None and (not values["python"] or values["python"].startswith("-")):
        raise TargetError(f"{title}: python={values['python']!r} is neither a name nor a path of a program.")
    ssh = Ssh(
        config=values["ssh_config"],
        user=values["user"],
        port=port,
        identity=values["identity"],
        options=tuple(values["ssh_option"] or ()),
        silence_s=values["silence_s"],
    )
    plain = {key: value for key, value in given.items() if value is not None} | {"hosts": [str(host) for host in hosts]}
    return SshSettings(
        hosts=hosts,
        ssh=ssh,
        python=values["python"],
        folder=_folder(title, values["folder"], ssh, hosts[0]),
        interface=values["interface"],
        plain=plain,
    )


def _folder(title: str, folder: str | None, ssh: Ssh, first: SshHost) -> str:
    if folder is None:
        user = first.user or ssh.user or ssh.resolve(first).get("user") or getpass.getuser()
        return f"/tmp/paceline-{re.sub(r'[^A-Za-z0-9_.-]', '_', user)}"
    path = PurePosixPath(folder)
    if not path.is_absolute() or ".." in path.parts:
        raise TargetError(
            f"{title}: folder={folder!r} is not an absolute path, which would be the same on all hosts. "
            "Write it out, such as /scratch/alice/paceline."
        )
    return str(path)
