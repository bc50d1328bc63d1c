"""pip packages into an environment: by uv where it can, by pip where not.

uv does not see what lies outside the environment. For a layer, then, what the base meets is not asked for, and all else
that the base has is excluded from the resolution; afterwards the metadata of what is visible are checked against every
requirement, as `pip check` does it. What is still open is asked for by name, and in the end pip, which sees the base,
does it all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.environments import pip_settings, program, reasons
from paceline.environments.base import Base
from paceline.environments.environment import Environment
from paceline.environments.pip_settings import Settings
from paceline.environments.program import Say
from paceline.environments.requirements import Line, constraints_of, lines_of, parse
from paceline.environments.venv import build_environment, site_packages
from paceline.environments.visible import Visible, name_of_project
from paceline.errors import EnvironmentBuildError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_ROUNDS = 4
#: What uv prints where it does not know an option or can't do what pip can.
_REFUSALS = ("unexpected argument", "unexpected '-'", "unsupported", "not supported", "unrecognized")


@dataclass(kw_only=True)
class Installer:
    """Installs into the environment at `prefix`.

    python: its interpreter. seen: folders of the base that it sees too. notes_dir: where the files lie that say what to
        install, kept with the environment.
    """

    prefix: Path
    python: Path
    base: Base
    seen: Sequence[Path]
    uv: str | None
    say: Say
    lock_fd: int

    def install(self, environment: Environment) -> None:
        """Install what the environment asks for, or what its lock says.

        Raises:
            EnvironmentBuildError: the resolver or the installer failed; its reason is in the message.
        """
        self._constraints = constraints_of(environment)
        lines = lines_of(environment)
        self._options = [line for line in lines if line.option is not None]
        wanted = [line for line in lines if line.option is None]
        if environment.locked_pip:
            locked = [
                line for text in environment.locked_pip for line in parse(text, "locked_pip", None, numbered=False)
            ]
            self._run(locked, "--no-deps")
        elif wanted and not self.seen:
            self._run(wanted)
        elif wanted:
            self._layer(wanted)

    def visible(self) -> Visible:
        return Visible([site_packages(self.prefix), *self.seen], self.base)

    def own(self) -> Visible:
        return Visible([site_packages(self.prefix)], self.base)

    def _layer(self, wanted: list[Line]) -> None:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        named = [line.requirement for line in wanted if line.requirement is not None]
        others = [line for line in wanted if line.requirement is None]
        limits = [line.requirement for line in self._constraints if line.requirement is not None]
        tails = {str(line.requirement): line for line in wanted if line.requirement is not None}
        before = self.visible()
        missing = before.missing(named, limits)
        if not missing and not others:
            self.say("the base has all that is asked for: nothing is installed")
            return
        names = {name for line in others if (name := _name_of(line)) is not None}
        if len(names) == len(others):
            excluded = set(before.found) - names
            for _ in range(_ROUNDS):
                excluded -= {canonicalize_name(requirement.name) for requirement in missing}
                asked = [tails.get(str(each)) or _line(each) for each in missing]
                if not self._run([*asked, *others], excluded=sorted(excluded)):
                    break  # pip has done it
                now = self.visible()
                required = [Requirement(text) for text in self._required(now)]
                open_now = now.missing(named, limits, urls_too=False) + now.missing(required, urls_too=False)
                if not open_now:
                    self._warn(now, before)
                    return
                if {str(each) for each in open_now} <= {str(each) for each in missing}:
                    break
                missing += [each for each in open_now if str(each) not in {str(known) for known in missing}]
        self.say("uv does not see what the base has; pip does it")
        self._pip(wanted)
        self._warn(self.visible(), before)

    def _required(self, now: Visible) -> list[str]:
        """name[extras] of what lies in the layer: asking for these asks for what they require."""
        return [
            f"{name}=={distribution.version}" for name, distribution in self.own().found.items() if name in now.found
        ]

    def _warn(self, now: Visible, before: Visible) -> None:
        """Say which packages of the base are given another version than they ask for."""
        changed = set(self.own().found)
        for name, requirement in now.broken(set(before.found) - changed):
            there = now.found.get(requirement.name.lower().replace("_", "-"))
            if there is not None and requirement.name.lower().replace("_", "-") in changed:
                self.say(f"warning: {name} of the base requires {requirement}, and the layer has {there.version}")

    def _run(self, lines: Sequence[Line], *more: str, excluded: Sequence[str] = ()) -> bool:
        """Install these lines; True where uv did it, False where pip did."""
        settings = pip_settings.read(build_environment())
        settings.add(self._options)
        variables = settings.uv_variables()
        secrets = [*settings.secrets(), *_secrets_in(lines)]
        reason = "uv is not installed" if self.uv is None else settings.for_pip or _for_pip(lines)
        if self.uv is None or reason:
            self.say(f"{reason}: pip installs")
            self._pip(lines, *more)
            return False
        command = [self.uv, "pip", "install", "--no-progress", "--python", str(self.python), *more]
        command += ["--requirements", str(self._write("requirements.txt", [line.text for line in lines]))]
        if self._constraints:
            command += ["--constraints", str(self._write("constraints.txt", [line.text for line in self._constraints]))]
        if excluded:
            command += ["--excludes", str(self._write("excludes.txt", excluded))]
        # What the user has set for uv itself counts.
        environment = variables | build_environment() | {"UV_NO_PROGRESS": "1"}
        if "cert" in settings.values:
            environment["SSL_CERT_FILE"] = settings.values["cert"][-1]
        code, output = program.run(command, environment, self.say, lock_fd=self.lock_fd, secrets=secrets)
        if code == 0:
            return True
        if code == 2 and any(word in line.lower() for line in output for word in _REFUSALS):
            self.say("uv refuses this: pip installs")
            self._pip(lines, *more)
            return False
        raise EnvironmentBuildError(_sentence(reasons.of_uv(output)))

    def _pip(self, lines: Sequence[Line], *more: str) -> None:
        file = self._write("requirements.txt", [line.text for line in (*self._options, *lines)])
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *more]
        command += [
            "--disable-pip-version-check",
            "--no-warn-script-location",
            "--progress-bar",
            "off",
            "-r",
            str(file),
        ]
        if self._constraints:
            command += ["-c", str(self._write("constraints.txt", [line.text for line in self._constraints]))]
        settings = Settings()
        settings.add(self._options)
        code, output = program.run(
            command,
            build_environment(),
            self.say,
            lock_fd=self.lock_fd,
            secrets=[*settings.secrets(), *_secrets_in(lines)],
        )
        if code != 0:
            raise EnvironmentBuildError(_sentence(reasons.of_pip(output)))

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        folder = self.prefix / "paceline"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path


def _line(requirement: Requirement) -> Line:
    return Line(where="", value=str(requirement), requirement=requirement)


def _name_of(line: Line) -> str | None:
    """The name of what a path makes, as far as that can be told without building it."""
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

    if line.path is None:
        return None
    if line.path.name:
        return canonicalize_name(line.path.name)
    if line.path.path.is_dir():
        return name_of_project(line.path.path)
    try:
        return parse_wheel_filename(line.path.path.name)[0]
    except InvalidWheelFilename:
        return None


def _for_pip(lines: Sequence[Line]) -> str:
    for line in lines:
        if any(option in line.tail for option in ("--config-setting", "--global-option", "-C")):
            return f"{line.text!r} has an option of pip's own"
    return ""


def _secrets_in(lines: Sequence[Line]) -> list[str]:
    """The values of variables that the lines name: they are secrets more often than not."""
    import re

    names = {name for line in lines for name in re.findall(r"\$\{([A-Z0-9_]+)\}", line.text)}
    return [os.environ[name] for name in names if name in os.environ]


def _sentence(reason: str) -> str:
    return reason if reason.endswith((".", "!", "?")) else f"{reason}."
