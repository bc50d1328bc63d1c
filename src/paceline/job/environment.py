"""The packages that a run's interpreter must have, as frozen data that goes to JSON and back. `paceline.environments` builds
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from paceline.errors import EnvironmentSpecError
from paceline.job.environment_rules import check, normalise

Spec = TypeVar("Spec", bound="EnvironmentSpec")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:  # noqa: PLW1641 - a frozen dataclass is given its hash
    """The environment of a run's script, as data. `paceline.Environment` adds to it what makes and registers one.

    name, version: under which it is registered; None for one that is not.
    python: interpreter that it is made from, or, with nothing to install, the one that runs the script; an absolute
        path, or a name on the image's PATH with `docker_image`. None for the submitting interpreter.
    python_version: for conda, such as "3.11"; None lets the solver choose.
    layered: what the base interpreter has installed is there too, and only what it lacks is added. False: nothing but
        what is named here, with what that requires.
    user_managed: the interpreter is used as it is; nothing may be named for installation.
    pip_packages: requirements as pip takes them; local paths are made absolute. pip_requirements: the text of a
        requirements file, nothing included from others (`Environment.from_pip_requirements`). pip_constraints: versions that
        hold if the package is needed at all, as `pip install -c` takes them.
    conda_packages: match specs. conda_channels: names or URLs, `file://` too; first has priority.
    environment_variables: for every worker; a job's own are laid over them.
    docker_image: the workers run in a container of this image. shm_size: of its /dev/shm, such as "2g".
    locked_pip: exact versions ("einops==0.8.1") that are installed in place of what pip would choose.
    locked_conda: exact packages (URLs with `#sha256`) that are installed in place of what the solver would choose.

    Raises:
        EnvironmentSpecError: values that contradict each other, or a password in a URL.
    """

    name: str | None = None
    version: int | None = None
    python: str | None = None
    python_version: str | None = None
    layered: bool = False
    user_managed: bool = False
    pip_packages: tuple[str, ...] = ()
    pip_requirements: str | None = None
    pip_constraints: tuple[str, ...] = ()
    conda_packages: tuple[str, ...] = ()
    conda_channels: tuple[str, ...] = ()
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    docker_image: str | None = None
    shm_size: str | None = None
    locked_pip: tuple[str, ...] = ()
    locked_conda: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        normalise(self)
        check(self)

    def __eq__(self, other: object) -> bool:
        """True if all values are equal: one that was read from a record equals the `paceline.Environment` it was made of."""
        if not isinstance(other, EnvironmentSpec):
            return NotImplemented
        # The fields of this class, for the __eq__ that a dataclass is given calls objects of two classes unequal without a look
        # at them.
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(EnvironmentSpec))

    @property
    def uses_conda(self) -> bool:
        """True if conda packages make the interpreter."""
        return bool(self.conda_packages or self.locked_conda)

    @property
    def needs_build(self) -> bool:
        """True if there is something to install; else the interpreter is used as it is."""
        return self.uses_conda or bool(self.pip_packages or (self.pip_requirements or "").strip() or self.locked_pip)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, defaults left out."""
        values = asdict(self) | {"environment_variables": dict(self.environment_variables)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] not in (None, (), {}, False)}

    @classmethod
    def from_json(cls: type[Spec], data: Mapping[str, Any]) -> Spec:
        """The environment that `to_json` wrote.

        Raises:
            EnvironmentSpecError: a field that this version does not know, or a wrong value.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise EnvironmentSpecError(f"unknown fields of an environment {unknown}; known are {sorted(known)}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**values)
