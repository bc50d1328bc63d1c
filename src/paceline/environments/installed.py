"""Looks at the distributions in some folders, and at the requirements that they leave open."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from paceline.environments.base import Base


class Visible:
    """The distributions of these folders; of two of one name the first counts, as for `import`.

    base: whose Python decides on markers.
    """

    def __init__(self, folders: Sequence[Path], base: Base) -> None:
        self._markers = _markers(base)
        self.found: dict[str, Distribution] = {}
        for distribution in distributions(path=[str(folder) for folder in folders]):
            name = distribution.metadata["Name"]
            if name:
                self.found.setdefault(canonical(name), distribution)

    def versions(self) -> set[str]:
        """ "name==version" of each."""
        return {f"{name}=={distribution.version}" for name, distribution in self.found.items()}

    def missing(
        self, requirements: Iterable[Requirement], constraints: Sequence[Requirement] = (), *, urls_too: bool = True
    ) -> list[Requirement]:
        """Return what of these, of their extras and of what they require in turn is missing or has a wrong version.

        Of a requirement that is met but needs something that is missing, only what is missing comes back. Markers have
        been decided on and are left out.
        urls_too: count a requirement that names a URL as missing, whatever there is.
        """
        limits: dict[str, list[Requirement]] = {}
        for limit in constraints:
            if self._applies(limit, set()):
                limits.setdefault(canonical(limit.name), []).append(limit)
        todo = [(requirement, urls_too) for requirement in requirements if self._applies(requirement, set())]
        seen: set[tuple[str, bool, frozenset[str]]] = set()
        lacking: dict[str, Requirement] = {}
        while todo:
            requirement, asks_for_url = todo.pop()
            name = canonical(requirement.name)
            # As a text it has the URL as well, and what counts as met depends on who asks.
            mark = (str(bare(requirement)), asks_for_url, frozenset(requirement.extras))
            if mark in seen:
                continue
            seen.add(mark)
            distribution = self.found.get(name)
            if (
                distribution is None
                or (requirement.url and asks_for_url)
                or not all(_meets(distribution, each) for each in (requirement, *limits.get(name, ())))
            ):
                plain = bare(requirement)
                lacking[str(plain)] = plain
                continue
            # Where metadata of others names a URL, what is there will do: only what was asked for itself has to come from its
            # URL.
            todo += [(each, False) for each in self._requires(distribution, requirement.extras)]
        return [lacking[text] for text in sorted(lacking)]

    def required_by(self, names: Iterable[str]) -> list[Requirement]:
        """Return what these distributions require, here and with this Python."""
        return [each for name in sorted(names) if name in self.found for each in self._requires(self.found[name], ())]

    def broken(self, names: Iterable[str]) -> list[tuple[str, Requirement]]:
        """(distribution, what it requires) for each requirement of these distributions that is not met."""
        return [
            (name, requirement)
            for name in sorted(names)
            for requirement in self._requires(self.found[name], ())
            if (there := self.found.get(canonical(requirement.name))) is None or not _meets(there, requirement)
        ]

    def locks(self, versions: Iterable[str]) -> tuple[str, ...]:
        """Requirements by which exactly these ("name==version") are installed again, from wherever they came."""
        return tuple(sorted(_lock(name, self.found[name]) for name in (text.split("==")[0] for text in versions)))

    def _requires(self, distribution: Distribution, extras: Iterable[str]) -> list[Requirement]:
        from packaging.requirements import InvalidRequirement, Requirement

        found = []
        for text in distribution.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue  # old metadata; pip can't read it either
            if self._applies(requirement, set(extras)):
                found.append(requirement)
        return found

    def _applies(self, requirement: Requirement, extras: set[str]) -> bool:
        from packaging.markers import UndefinedEnvironmentName

        if requirement.marker is None:
            return True
        try:
            # Also with no extra, for a marker that names none applies in any case.
            return any(requirement.marker.evaluate({**self._markers, "extra": extra}) for extra in ("", *extras))
        except UndefinedEnvironmentName:
            # A marker of a later standard is taken for true, so that nothing is left out.
            return True


def bare(requirement: Requirement) -> Requirement:
    """The requirement without its marker: `extra == "x"` would be false anywhere else."""
    from copy import copy

    plain = copy(requirement)
    plain.marker = None
    return plain


def name_of_project(folder: Path) -> str | None:
    """The name of the distribution that a source folder makes; None where only building it could tell."""
    import configparser

    try:
        # From Python 3.11 on; before, only building tells.
        tomllib = importlib.import_module("tomllib")
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        if isinstance(project.get("name"), str):
            return canonical(project["name"])
    except (ImportError, OSError, ValueError, AttributeError):
        pass
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(folder / "setup.cfg", encoding="utf-8")
    except (OSError, ValueError, configparser.Error):
        return None
    name = parser.get("metadata", "name", fallback=None)
    return canonical(name) if name else None


def canonical(name: str) -> str:
    """The one spelling of a distribution's name."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


def _meets(distribution: Distribution, requirement: Requirement) -> bool:
    from packaging.version import InvalidVersion

    try:
        # A pre-release that is installed is there on purpose; `contains` would refuse it by itself.
        return requirement.specifier.contains(distribution.version, prereleases=True)
    except (InvalidVersion, TypeError):
        # Old packages may have a version that is none: it meets a requirement that names none.
        return not str(requirement.specifier)


def _markers(base: Base) -> dict[str, str]:
    """The values that markers are compared with, for the base's Python on this machine."""
    from packaging.markers import default_environment

    here = default_environment()
    names = {"cpython": "CPython", "pypy": "PyPy", "graalpy": "GraalVM"}
    return {
        **{name: str(value) for name, value in here.items()},
        "python_version": ".".join(base.version.split(".")[:2]),
        "python_full_version": base.version,
        "implementation_name": base.implementation,
        "platform_python_implementation": names.get(base.implementation, base.implementation),
    }


def _lock(name: str, distribution: Distribution) -> str:
    # Says where a distribution came from, unless that was an index (PEP 610).
    text = distribution.read_text("direct_url.json")
    try:
        origin: dict[str, Any] = json.loads(text) if text else {}
    except ValueError:
        origin = {}
    url = origin.get("url")
    if not isinstance(url, str):
        return f"{name}=={distribution.version}"
    if "vcs_info" in origin:
        commit = origin["vcs_info"].get("commit_id", "")
        tail = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
        return f"{name} @ {origin['vcs_info'].get('vcs', 'git')}+{url}@{commit}{tail}"
    if origin.get("dir_info", {}).get("editable"):
        from urllib.parse import unquote, urlsplit

        return f"-e {unquote(urlsplit(url).path)}"
    digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
    return f"{name} @ {url}#sha256={digest}" if digest and "#" not in url else f"{name} @ {url}"
