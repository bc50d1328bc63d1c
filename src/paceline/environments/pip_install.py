"""Install pip packages, by uv if possible, else by pip.

A layered environment sees the packages of its base interpreter, but uv does not. So uv gets only the requirements that
the base does not meet, and must not install packages that the base has. Then Paceline checks the metadata of all
visible packages, as `pip check` does, and lets uv install unmet requirements. If requirements are unmet after several
rounds, Paceline calls pip for all packages, because pip sees the base.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.environments import pip_settings, program
from paceline.environments.base import Base
from paceline.environments.installed import Visible, bare, canonical, name_of_project
from paceline.environments.pip_settings import PipSettings
from paceline.environments.program import Say
from paceline.environments.requirements import RequirementLine, constraints_of, lines_of, parse
from paceline.environments.venv import build_environment, site_packages
from paceline.errors import EnvironmentBuildError
from paceline.job.environment import EnvironmentSpec
from paceline.job.secret_values import credentials_in

if TYPE_CHECKING:
    from packaging.requirements import Requirement


_ROUNDS = 4
#: Texts by which uv's output reports an unknown option or an unsupported feature.
_REFUSALS = ("unexpected argument", "unexpected '-'", "unsupported", "not supported", "unrecognized")

_LONGEST = 600
_ERROR = re.compile(r"(?:[A-Za-z_.]*(?:Error|Exception)\b|error:|fatal(?: error)?:)")
#: Lines of pip that only name a stage of the build, and say nothing about the cause.
_STAGES = ("error: metadata-generation-failed", "error: subprocess-exited-with-error", "error: failed-wheel-build")
#: Options of a single requirement in a requirements file that pip supports and uv does not.
_OF_PIP = ("--config-setting", "--global-option", "-C")
_NOISE = re.compile(r"^(warning|hint|DEBUG|WARNING|\[notice\]|note|Using Python|Resolved |Prepared |   Building )")


@dataclass(kw_only=True)
class Installer:
    """An installer of pip packages into the environment at `prefix`.

    Attributes:
        python: The interpreter of the environment.
        seen: Package folders of the base interpreter that the environment sees.
    """

    prefix: Path
    python: Path
    base: Base
    seen: Sequence[Path]
    uv: str | None
    say: Say
    lock_fd: int
    _options: list[RequirementLine] = field(default_factory=list)
    _constraints: list[RequirementLine] = field(default_factory=list)
    _wanted: list[RequirementLine] = field(default_factory=list)
    _settings: PipSettings | None = None
    #: Name of a variable that requirements contain -> the password in this variable, percent-encoded for URLs.
    _added: dict[str, str] = field(default_factory=dict)

    def install(self, environment: EnvironmentSpec) -> None:
        """Install the environment's packages, in the locked versions if it has a lock.

        Raises:
            EnvironmentBuildError: uv or pip failed; the message has the reason.
        """
        self._constraints = constraints_of(environment)
        lines = lines_of(environment)
        _check_variables([*lines, *self._constraints])
        self._options = [line for line in lines if line.option is not None]
        wanted = self._wanted = [line for line in lines if line.option is None]
        if environment.locked_pip:
            locked = [
                line for text in environment.locked_pip for line in parse(text, "locked_pip", None, numbered=False)
            ]
            # The lines of a lock file name all packages, so install them without resolving dependencies.
            self._run(locked, "--no-deps")
        elif wanted and not self.seen:
            self._run(wanted)
        elif wanted:
            self._layer(wanted)

    def visible(self) -> Visible:
        return Visible([site_packages(self.prefix), *self.seen], self.base)

    def own(self) -> Visible:
        return Visible([site_packages(self.prefix)], self.base)

    def locks(self, own: Visible, versions: Sequence[str]) -> tuple[str, ...]:
        """Return a lock: requirements that install exactly the packages in `versions`.

        own: Distributions of the environment, not of its base. A variable `${NAME}` in a URL stays, as it may be secret.
        """
        requested_urls = {
            canonical(line.requirement.name): line.value
            for line in self._wanted
            if line.requirement is not None and line.requirement.url and "${" in line.requirement.url
        }
        plain = [version for version in versions if version.partition("==")[0] not in requested_urls]
        names = {version.partition("==")[0] for version in versions}
        return tuple(sorted([*own.locks(plain), *(line for name, line in requested_urls.items() if name in names)]))

    def _layer(self, wanted: list[RequirementLine]) -> None:
        named = [line.requirement for line in wanted if line.requirement is not None]
        others = [line for line in wanted if line.requirement is None]
        limits = [line.requirement for line in self._constraints if line.requirement is not None]
        as_written = {str(bare(line.requirement)): line for line in wanted if line.requirement is not None}
        before = self.visible()
        missing = before.missing(named, limits)
        if not missing and not others:
            self.say("the base has all that is asked for: nothing is installed")
            return
        names = {name for line in others if (name := _name_of(line)) is not None}
        # Exclude packages only if all requested names are known, because uv excludes even a requested package.
        rounds = _ROUNDS if len(names) == len(others) else 0
        excluded = set(before.found) - names
        # Exclude all packages that the base has. If a package is needed in another version, the next round requests it.
        for _ in range(rounds):
            excluded -= {canonical(requirement.name) for requirement in missing}
            requested = [as_written.get(str(each)) or _line(each) for each in missing]
            if not self._run([*requested, *others], excluded=sorted(excluded)):
                return  # `_run` has installed the packages by pip instead of uv
            now = self.visible()
            still = now.missing(
                [*named, *_extras_of(others), *now.required_by(self.own().found)], limits, urls_too=False
            )
            # Leave out the packages in `missing`, which this round has requested: requesting them again would not help.
            more = [each for each in still if str(each) not in set(map(str, missing))]
            if not still:
                self._warn(now, before)
                return
            if not more:
                break
            self.say(f"the base does not have {', '.join(map(str, more))}")
            missing += more
        self.say("uv does not see what the base has: pip installs")
        self._pip(wanted)

    def _warn(self, now: Visible, before: Visible) -> None:
        """Warn about packages of the base whose requirements the newly installed versions break."""
        own = set(self.own().found)
        for name, requirement in now.broken(set(before.found) - own):
            if canonical(requirement.name) in own:
                there = now.found[canonical(requirement.name)].version
                self.say(f"warning: {name} of the base requires {requirement}, and the layer has {there}")

    def _run(self, lines: Sequence[RequirementLine], *more: str, excluded: Sequence[str] = ()) -> bool:
        settings = self._settings_of_pip()
        variables = settings.uv_variables()
        reason = "uv is not installed" if self.uv is None else settings.for_pip or _for_pip(lines)
        if self.uv is None or reason:
            self.say(f"{reason}: pip installs")
            self._pip(lines, *more)
            return False
        command = [self.uv, "pip", "install", "--python", str(self.python), *more]
        command += ["--requirements", str(self._write("requirements.txt", [line.text for line in lines]))]
        command += self._limits("--constraints", more)
        if excluded:
            command += ["--excludes", str(self._write("excludes.txt", excluded))]
        command += _refreshed(lines)
        if settings.no_index:
            command.append("--no-index")
        code, output = program.run(
            command,
            _for_uv({**build_environment(), **self._added}, variables),
            self.say,
            lock_fd=self.lock_fd,
            secrets=[*settings.secrets(), *_secrets_in(lines)],
        )
        if code == 0:
            return True
        # Exit code 2 of uv means that it refused the command line or a file; 1 means that there is no solution.
        if code == 2 and any(word in line.lower() for line in output for word in _REFUSALS):
            self.say("uv refuses this: pip installs")
            self._pip(lines, *more)
            return False
        raise EnvironmentBuildError(_sentence(of_uv(output)))

    def _settings_of_pip(self) -> PipSettings:
        """Return the user's pip settings, with the options of the requirements file."""
        if self._settings is None:
            self._settings = pip_settings.read(build_environment())
            self._settings.add(self._options)
        return self._settings

    def _pip(self, lines: Sequence[RequirementLine], *more: str) -> None:
        file = self._write("requirements.txt", [line.text for line in (*self._options, *lines)])
        # Run pip as `pip --python` does, but as a child of this process, which ends with this process and holds the lock.
        command = [str(self.python), str(_pip_folder()), "install", *more]
        command += [
            "--disable-pip-version-check",
            "--no-warn-script-location",
            "--progress-bar",
            "off",
            "-r",
            str(file),
        ]
        command += self._limits("-c", more)
        secrets = [*self._settings_of_pip().secrets(), *_secrets_in([*self._options, *lines])]
        # Set the variable that pip sets when it runs in another interpreter: pip then does not search for an interpreter again.
        variables = {**build_environment(), **self._added, "_PIP_RUNNING_IN_SUBPROCESS": "1"}
        code, output = program.run(command, variables, self.say, lock_fd=self.lock_fd, secrets=secrets)
        if code != 0:
            raise EnvironmentBuildError(_sentence(of_pip(output)))

    def _limits(self, option: str, more: Sequence[str]) -> list[str]:
        # If `more` is --no-deps, the packages come from a lock file, which needs no constraints.
        if not self._constraints or more:
            return []
        return [option, str(self._write("constraints.txt", [line.text for line in self._constraints]))]

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        folder = self.prefix / "paceline"
        folder.mkdir(exist_ok=True)
        path = folder / name
        text, added = pip_settings.encoded_variables("".join(f"{line}\n" for line in lines), os.environ)
        self._added |= added
        path.write_text(text, encoding="utf-8")
        return path


def _line(requirement: Requirement) -> RequirementLine:
    return RequirementLine(where="", value=str(requirement), requirement=requirement)


def _check_variables(lines: Sequence[RequirementLine]) -> None:
    """Raise EnvironmentBuildError if a variable `${NAME}` in the lines is not set."""
    names = [(line.text, name) for line in lines for name in re.findall(r"\$\{([A-Z0-9_]+)\}", line.text)]
    for text, name in names:
        if not os.environ.get(name):
            raise EnvironmentBuildError(
                f"{text!r} needs the variable {name}, which is not set. Set it and submit again."
            )


def _pip_folder() -> Path:
    spec = importlib.util.find_spec("pip")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentBuildError("pip is not installed beside Paceline. Install it: python -m ensurepip.")
    return Path(next(iter(spec.submodule_search_locations)))


def _name_of(line: RequirementLine) -> str | None:
    from urllib.parse import parse_qs, unquote, urlsplit

    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    if line.path is not None and line.path.name:
        return canonical(line.path.name)
    if line.path is not None and line.path.path.is_dir():
        return name_of_project(line.path.path)
    if line.path is None:
        url = urlsplit(line.value)
        # The line may be, for example, git+https://host/project#egg=name
        if egg := parse_qs(url.fragment).get("egg"):
            return canonical(egg[0].partition("[")[0])
    file_name = line.path.path.name if line.path is not None else unquote(url.path).rpartition("/")[2]
    try:
        return parse_wheel_filename(file_name)[0]
    except InvalidWheelFilename:
        return None


def _extras_of(lines: Sequence[RequirementLine]) -> list[Requirement]:
    from packaging.requirements import Requirement

    return [
        Requirement(f"{name}{line.path.extras}")
        for line in lines
        if line.path is not None and line.path.extras and (name := _name_of(line))
    ]


def _refreshed(lines: Sequence[RequirementLine]) -> list[str]:
    """Return the options that make uv build source folders again.

    Otherwise uv would notice only changes of pyproject.toml and setup.py.
    """
    folders = [line for line in lines if line.path is not None and line.path.path.is_dir()]
    names = [_name_of(line) for line in folders]
    # The name of a folder's package is unknown, so let uv build all packages again.
    if None in names:
        return ["--refresh"]
    return [word for name in names for word in ("--refresh-package", str(name))]


def _for_uv(environment: Mapping[str, str], translated: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name.startswith("UV_")}
    return {**environment, **translated, **kept, "UV_NO_PROGRESS": "1"}


def _for_pip(lines: Sequence[RequirementLine]) -> str:
    own = (line.text for line in lines for option in _OF_PIP if option in line.tail)
    return next((f"{text!r} has an option of pip's own" for text in own), "")


def _secrets_in(lines: Sequence[RequirementLine]) -> list[str]:
    names = {name for line in lines for name in re.findall(r"\$\{([A-Z0-9_]+)\}", line.text)}
    proxies = [value for name, value in os.environ.items() if name.upper().endswith("_PROXY")]
    return [os.environ[name] for name in names if name in os.environ] + [o for p in proxies for o in credentials_in(p)]


def _sentence(reason: str) -> str:
    return reason if reason.endswith((".", "!", "?")) else f"{reason}."


def of_uv(lines: Sequence[str]) -> str:
    """Extract the first error message from uv's output lines."""
    for number, line in enumerate(lines):
        match = re.match(r"\s*(?:error:|×)\s*(.*)", line)
        if match is None:
            continue
        head, causes = match[1], [""]
        for each in lines[number + 1 :]:
            if re.match(r"\s*(hint|error):", each):
                break
            text = re.sub(r"^\s*(?:[│├╰─▶╭·]+\s*)+", "", each).strip()
            if cause := re.match(r"\s*(?:[Cc]aused by|cause):\s*(.*)|\s*[├╰]─+▶\s*(.*)", each):
                causes.append(cause[1] or cause[2] or "")
            elif text and not _NOISE.match(text):
                causes[-1] = f"{causes[-1]} {text}".strip()
        # After a failed resolution, leave out uv's first line, because the causes below it contain all that matters.
        reasons = [part.rstrip(". ") for part in (head, *causes) if part]
        return _short(
            ": ".join(reasons[1:] if len(reasons) > 1 and reasons[0].startswith("No solution found") else reasons)
        )
    return _last(lines)


def of_pip(lines: Sequence[str]) -> str:
    """Extract the errors and conflicts from pip's output lines."""
    reasons: list[str] = []
    for number, line in enumerate(lines):
        # The indented lines below an error may name the package.
        below = [each.strip() for each in takewhile(lambda each: each.startswith("    "), lines[number + 1 :])]
        if line.startswith("The conflict is caused by:"):
            reasons.insert(0, "; ".join(below[:4]))
        elif line.strip().startswith("ERROR:"):
            reasons.append(" ".join((line.partition("ERROR:")[2].strip(), *below[:4])))
    inner = [text for line in lines if _ERROR.match(text := line.strip(" │|╰─>×")) and not text.startswith(_STAGES)]
    parts = [each.rstrip(".: ") for each in dict.fromkeys((*reasons[:3], *inner[-1:])) if each]
    return _short(". ".join(parts)) if parts else _last(lines)


def _last(lines: Sequence[str]) -> str:
    reasons = [line.strip() for line in lines if line.strip()]
    return _short(reasons[-1]) if reasons else "it printed nothing"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
