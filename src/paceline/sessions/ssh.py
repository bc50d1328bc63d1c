"""A session's ssh server, without a port: `paceline exec` starts `sshd -i` for each connection.

The worker writes a configuration with a separate host key into a private folder. Only the session's own key may log in,
as the user of the run.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from paceline.errors import JobError
from paceline.sessions import KEY_VARIABLE, Serving, private_folder, serving_line

_PLACES = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


def configuration(folder: Path, environment: dict[str, str]) -> str:
    """Return the text of an sshd_config that sets the run's variables in shells."""
    kept = {name: value for name, value in environment.items() if not set(value) & set('"\n\\') and name.isidentifier()}
    variables = " ".join(f'"{name}={value}"' for name, value in sorted(kept.items()))
    return "\n".join(
        (
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            # Don't let sshd check the modes of all parent folders, because this folder itself is private.
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "PidFile none",
            "Subsystem sftp internal-sftp",
            f"SetEnv {variables}",
            "",
        )
    )


class SshServer:
    """The files of a session's ssh server: its configuration and keys."""

    def __init__(self) -> None:
        sshd, keygen = shutil.which("sshd", path=_PLACES), shutil.which("ssh-keygen", path=_PLACES)
        if sshd is None or keygen is None:
            raise JobError(
                "this node has no sshd, which a session with --ssh needs. Install openssh-server, or use --shell."
            )
        self._folder = private_folder()
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / "host_key")],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        (self._folder / "authorized_keys").write_text(os.environ[KEY_VARIABLE] + "\n")
        (self._folder / "sshd_config").write_text(configuration(self._folder, dict(os.environ)))
        words = shlex.join([sshd, "-i", "-f", str(self._folder / "sshd_config")])
        print(serving_line(Serving(kind="ssh", at=f"{getpass.getuser()} {words}")), flush=True)

    def close(self) -> None:
        """Remove the files of the ssh server."""
        shutil.rmtree(self._folder, ignore_errors=True)
