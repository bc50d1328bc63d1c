"""Find installed distributions, and their unmet requirements."""

from __future__ import annotations

import contextlib
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
    """The distributions that are installed in some folders.

    If several distributions have the same name, the first distribution counts. base: The interpreter for which markers
    such as `python_version` are evaluated.
    """

    def __init__(self, folders: Sequence[Path], base: Base) -> None:
        self._markers = _markers(base)
        self.found: dict[str, Distribution] = {}
        for distribution in distributions(path=[str(folder) for folder in folders]):
            name = None
            # A newer importlib_metadata, which another package may have installed, raises for empty metadata.
            with contextlib.suppress(FileNotFoundError):
                name = distribution.metadata["Name"]
            if name:
                self.found.setdefault(canonical(name), distribution)

    def versions(self) -> set[str]:
        """Return "name==version" for each distribution."""
        return {f"{name}=={distribution.version}" for name, distribution in self.found.items()}

    def missing(
        self, requirements: Iterable[Requirement], constraints: Sequence[Requirement] = (), *, urls_too: bool = True
    ) -> list[Requirement]:
        """Return the unmet requirements, including requirements of dependencies.

        If a requirement is met but a dependency is missing, return only the dependency. Returned requirements have no markers.

        urls_too: Also return every requirement with a URL, even if a distribution of that name is installed.
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
            # Skip a repeated requirement: one with equal text (with the URL), extras and need to come from the URL.
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
            # Any installed version satisfies a dependency that has a URL. Only requested packages must come from their URL.
            todo += [(each, False) for each in self._requires(distribution, requirement.extras)]
        return [lacking[text] for text in sorted(lacking)]

    def required_by(self, names: Iterable[str]) -> list[Requirement]:
        """Return the requirements of these distributions, if their markers apply."""
        return [each for name in sorted(names) if name in self.found for each in self._requires(self.found[name], ())]

    def broken(self, names: Iterable[str]) -> list[tuple[str, Requirement]]:
        """Return (name, requirement) for each unmet requirement of the distributions `names`."""
        return [
            (name, requirement)
            for name in sorted(names)
            for requirement in self._requires(self.found[name], ())
            if (there := self.found.get(canonical(requirement.name))) is None or not _meets(there, requirement)
        ]

    def locks(self, versions: Iterable[str]) -> tuple[str, ...]:
        """Return exact requirements for these "name==version", by URL if installed from a URL."""
        return tuple(sorted(_lock(name, self.found[name]) for name in (text.split("==")[0] for text in versions)))

    def _requires(self, distribution: Distribution, extras: Iterable[str]) -> list[Requirement]:
        from packaging.requirements import InvalidRequirement, Requirement

        required = []
        for text in distribution.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue  # skip an old package's invalid metadata, which pip can't read either
            if self._applies(requirement, set(extras)):
                required.append(requirement)
        return required

    def _applies(self, requirement: Requirement, extras: set[str]) -> bool:
        from packaging.markers import UndefinedEnvironmentName

        if requirement.marker is None:
            return True
        try:
            # Also evaluate the marker without an extra: if the marker names no extra, the requirement always applies.
            return any(requirement.marker.evaluate({**self._markers, "extra": extra}) for extra in ("", *extras))
        except UndefinedEnvironmentName:
            return True  # the marker has an unknown variable: an unnecessary package does less harm than a missing one


def bare(requirement: Requirement) -> Requirement:
    """Return the requirement without its marker."""
    from copy import copy

    plain = copy(requirement)
    plain.marker = None
    return plain


def name_of_project(folder: Path) -> str | None:
    """Return the distribution name in a source folder's pyproject.toml or setup.cfg, or None."""
    import configparser

    try:
        # Python has `tomllib` since 3.11.
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
    """Return a distribution's name in the normalized form of PyPI."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


def _meets(distribution: Distribution, requirement: Requirement) -> bool:
    from packaging.version import InvalidVersion

    try:
        # Allow pre-releases: `contains` refuses them by default, but an installed pre-release was chosen on purpose.
        return requirement.specifier.contains(distribution.version, prereleases=True)
    except (InvalidVersion, TypeError):
        # An old package may have an invalid version, which meets only a requirement without a version.
        return not str(requirement.specifier)


def _markers(base: Base) -> dict[str, str]:
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
    # pip records the origin of a distribution that did not come from an index (PEP 610).
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
