"""Call Slurm's programs on this machine or through the login host, and interpret their failures."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import EngineError, TargetError
from paceline.targets.slurm.settings import SlurmSettings
from paceline.targets.ssh.hosts import SshHost, read_login

if TYPE_CHECKING:
    from paceline.targets.ssh.command import Ssh

#: Time limit of a call in seconds. Slurm's programs wait for a busy controller for MessageTimeout (10 s) or longer.
CALL_S = 40.0
#: Seconds for which a submission waits for a controller that restarts or fails over.
PATIENCE_S = 120.0
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)

#: Messages which mean that Slurm's controller can't be reached. After a timeout, the controller may have executed the request.
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Connection timed out|No route to host"
    r"|Transport endpoint is not connected|Zero Bytes were transmitted|Communication connection failure"
    r"|Message receive failure|temporarily unable to accept job|Slurm backup controller in standby|connect failure"
    r"|Resource temporarily unavailable|Error connecting slurm stream socket|Could not establish a configuration source"
    r"|Munge encode failed",
    re.IGNORECASE,
)
#: Slurm's message on a machine without a cluster. (A temporary failure of DNS is "Host name lookup failure".)
_UNCONFIGURED = re.compile(r"res_nsearch error: Unknown host.*DNS SRV lookup failed", re.DOTALL)
#: Variables that change the output format of Slurm's programs.
_FORM_VARIABLES = re.compile(r"(SQUEUE|SACCT|SINFO|SCONTROL|SCANCEL)_|SLURM_(TIME_FORMAT|BITSTR_LEN|DEBUG)\b")


class AwayError(EngineError):
    """The error that Slurm or the login host does not answer."""


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The exit code and output of a Slurm program."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """The program's error messages in one line, without the program's name."""
        lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line).strip() for line in self.stderr.splitlines()]
        return "; ".join(dict.fromkeys(line for line in lines if line)) or f"exit code {self.returncode}"


class Scheduler:
    """A caller of Slurm's programs, on this machine or the login host.

    title: The name of the target in error messages.
    """

    def __init__(self, title: str, settings: SlurmSettings) -> None:
        self.title = title
        self.settings = settings

    @property
    def where(self) -> str:
        """A text that identifies the cluster, hashed into its cache file's name."""
        settings = self.settings
        return repr((settings.login, settings.ssh_config, settings.ssh_options, os.environ.get("SLURM_CONF", "")))

    def call(
        self,
        argv: Sequence[str],
        *,
        input: str = "",
        timeout_s: float = CALL_S,
        environment: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Call a Slurm program.

        environment: Environment of a program on this machine; None for the environment of this process.

        Raises:
            AwayError: The controller, the login host or the program did not answer.
            TargetError: The program does not exist.
        """
        settings = self.settings
        try:
            done = subprocess.run(
                self.words(argv),
                input=input,
                capture_output=True,
                text=True,
                # Job names may have bytes that are not UTF-8.
                errors="replace",
                timeout=timeout_s,
                check=False,
                env=plain(os.environ) if environment is None else dict(environment),
            )
        except FileNotFoundError as error:
            raise TargetError(
                f"{self.title}: there is no program {argv[0]!r} on this machine's PATH. Submit from a machine of the "
                "cluster, or name its login host (the setting login)."
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            what = f"in {timeout_s:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else f"({error})"
            raise AwayError(f"{self.title}: {argv[0]} gave no answer {what}.") from error
        result = CommandResult(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
        # Exit code 255 is ssh's error, unless sbatch has printed a message: sbatch exits with 255 for an unknown option.
        is_its_own = re.search(rf"^{re.escape(argv[0])}: ", done.stderr, re.MULTILINE)
        if settings.login is not None and done.returncode in (255, 127) and not is_its_own:
            where = f"{self.title}: the login host {settings.login}"
            if done.returncode == 255:
                raise AwayError(f"{where}: {self.explain(done.stderr, 255)}")
            raise TargetError(f"{where} has no program {argv[0]!r} on its PATH ({result.said}).")
        if result.returncode != 0 and _UNCONFIGURED.search(result.stderr):
            where = "this machine" if settings.login is None else f"the login host {settings.login}"
            raise TargetError(
                f"{self.title}: {where} has Slurm's programs, but neither a slurm.conf nor a controller's name in DNS "
                f"({result.said}). Set SLURM_CONF there, or submit from a machine of the cluster or through its login host "
                "(the setting login)."
            )
        # Slurm's programs exit with 1 for any error. Only the text shows whether the controller was unreachable.
        if result.returncode != 0 and _AWAY.search(result.stderr):
            who = "accounting" if argv[0] == "sacct" else "controller"
            raise AwayError(f"{self.title}: Slurm's {who} does not answer ({result.said}).")
        return result

    def call_patiently(
        self,
        call: Callable[[], CommandResult],
        *,
        tell: Callable[[str], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> CommandResult:
        """Retry `call` while Slurm does not answer, reporting errors to `tell`.

        Raises:
            AwayError: Slurm still does not answer after `patience_s`.
        """
        deadline, told = time.monotonic() + patience_s, ""
        for attempt in range(1_000_000):
            try:
                return call()
            except AwayError as error:
                # Wait longer after each try: a controller's failover takes minutes, and hundreds of runs may be waiting.
                pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
                if time.monotonic() + pause > deadline:
                    raise AwayError(f"{error} Tried for {patience_s:.0f} s. `scontrol ping` says more.") from error
                if tell is not None and str(error) != told:
                    told = str(error)
                    tell(f"{told} Trying again, for up to {patience_s:.0f} s.")
                time.sleep(pause)
        raise AssertionError("a deadline ends the loop")

    def words(self, argv: Sequence[str]) -> list[str]:
        """Return a program's command line, with ssh if there is a login host."""
        if self.settings.login is None:
            return list(argv)
        # The login host's shell may set SLURM_TIME_FORMAT, which changes the times in Slurm's answers. So drop it.
        return self.ssh_words(shlex.join(["env", "-u", "SLURM_TIME_FORMAT", *argv]))

    def ssh_words(self, command: str) -> list[str]:
        """Return the ssh command line. `command` is for the login host's shell."""
        ssh, host = self._ssh()
        return ssh.words(host, [command], leave_open=True)

    def explain(self, said: str, exit_code: int | None, python: str = "python3") -> str:
        """Explain from ssh's output why the login host can't be used."""
        from paceline.targets.ssh.command import explain

        ssh, host = self._ssh()
        return explain(host, said, exit_code, ssh.login_words(host), python)

    def _ssh(self) -> tuple[Ssh, SshHost]:
        from paceline.targets.ssh.command import Ssh

        assert self.settings.login is not None, "there is a login host"
        ssh = Ssh(config=self.settings.ssh_config, options=self.settings.ssh_options)
        return ssh, read_login(self.settings.login, self.title)


def plain(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that change Slurm's output format."""
    return {name: value for name, value in environment.items() if not _FORM_VARIABLES.match(name)}
