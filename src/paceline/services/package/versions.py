"""Package versions for a packaged model, from its run and from the server."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.environments.requirements import lines_of
from paceline.errors import ServiceError
from paceline.job.environment import EnvironmentSpec
from paceline.system.plugins import version_of

#: Packages that the server needs. uvicorn's extras make the server faster if they are installed.
_SERVER = ("starlette", "uvicorn", "httptools", "uvloop")
#: Framework -> name of its package on PyPI. The package of any other framework has the framework's own name.
_FRAMEWORKS = {"sklearn": "scikit-learn", "scikit-learn": "scikit-learn", "pytorch": "torch", "tfkeras": "tensorflow"}


@dataclass(frozen=True)
class PackageVersions:
    """Package requirements with exact versions.

    requirements: Lines such as "torch==2.5.0".
    constraints: Lines of the same form for the packages on which the requirements depend.
    """

    requirements: tuple[str, ...]
    constraints: tuple[str, ...]


def server_versions() -> PackageVersions:
    """Return the packages that the server needs, in the installed versions."""
    here = {name: metadata.version(name) for name in _closure(_SERVER)}
    return PackageVersions(
        tuple(f"{name}=={here[name]}" for name in _SERVER if name in here),
        tuple(f"{name}=={version}" for name, version in sorted(here.items())),
    )


def of_environment(
    environment: EnvironmentSpec | None, packages: Collection[str], framework: str | None, source: Path | None
) -> PackageVersions:
    """Return the exact versions of the packages that the model's script needs.

    environment: The environment of the run that made the model. If Paceline has built it, all its packages are needed.
    packages: "name==version" of all packages in that environment. If the environment was not built, only the packages
        that the source imports, and the model's framework, are needed.
    framework: The model's framework, such as "sklearn".
    source: The script's folder.

    Raises:
        ServiceError: The environment has conda packages, or local folders or files, which pip can't install elsewhere.
    """
    exact = {_name(line): line.partition("+")[0] for line in packages if "==" in line}
    if environment is not None and environment.needs_build:
        if environment.uses_conda:
            raise ServiceError(
                "the model's environment has packages of conda's, which a package can't install. Name those that the script "
                "needs from pip: --requirements FILE or --pip PACKAGE."
            )
        wanted = [str(line) for line in (environment.locked_pip or lines_of(environment))]
        local = [line for line in wanted if "file:" in line or line.startswith(("-e", "/", "./", "--find-links /"))]
        if local:
            raise ServiceError(
                f"the model's environment has {local[0]!r}, which only this machine has. Name a place for other "
                "machines: --requirements FILE or --pip PACKAGE."
            )
        if not environment.layered:
            return PackageVersions(tuple(wanted), tuple(exact.values()))
        lines = {_name(line): line for line in wanted}
    else:
        lines = {}
    for name in _imported(source, framework):
        if name in exact:
            lines.setdefault(name, exact[name])
    return PackageVersions(tuple(lines[name] for name in sorted(lines)), tuple(exact.values()))


def merged(model: PackageVersions, server: PackageVersions) -> PackageVersions:
    """Return the packages of model and server. The model's versions take precedence."""
    own = {_name(line) for line in (*model.requirements, *model.constraints)}
    requirements = [*model.requirements]
    taken = {_name(line) for line in requirements}
    for line in server.requirements:
        if (name := _name(line)) not in taken:
            requirements.append(name if name in own else line)
    constraints = [*model.constraints, *(line for line in server.constraints if _name(line) not in own)]
    requested = {_name(line) for line in requirements if "==" in line}
    return PackageVersions(
        tuple(requirements),
        tuple(sorted((line for line in constraints if _name(line) not in requested), key=str.lower)),
    )


def uses_azureml(source: Path | None) -> bool:
    """Return whether the source imports the Azure SDK."""
    return "azureml" in _modules(source)


def _modules(source: Path | None) -> set[str]:
    modules: set[str] = set()
    for path in sorted(source.rglob("*.py")) if source is not None else ():
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # skip a file that is not valid Python, which the script can't import either
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                modules.add(node.module.partition(".")[0])
    return modules


def _imported(source: Path | None, framework: str | None) -> Iterable[str]:
    modules = _modules(source) - {*sys.stdlib_module_names, "paceline", "azureml"}
    if framework:
        modules.add(framework.lower())
    # Take each module's distribution from this interpreter's metadata. Without an entry, assume the module's own name.
    known = metadata.packages_distributions() if modules else {}
    distributions = (known.get(module) or [_FRAMEWORKS.get(module, module)] for module in modules)
    return sorted({_name(name) for names in distributions for name in names} - {"paceline"})


def _closure(names: Iterable[str]) -> list[str]:
    seen: dict[str, None] = {}
    todo = list(names)
    while todo:
        name = _name(todo.pop())
        if name in seen or version_of(name) is None:
            continue
        seen[name] = None
        # Skip requirements that only belong to an extra of the package.
        todo += [line for line in metadata.requires(name) or () if "extra ==" not in line]
    return list(seen)


def _name(line: str) -> str:
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else line
