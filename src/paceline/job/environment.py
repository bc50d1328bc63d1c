"""Define the packages of a run's interpreter, as frozen data; `paceline.environments` builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from paceline.errors import EnvironmentSpecError
from paceline.job.environment_rules import check, normalise

Spec = TypeVar("Spec", bound="EnvironmentSpec")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:  # noqa: PLW1641 - a frozen dataclass is given its hash
    """The environment of a run's script: interpreter, packages, variables and image.

    Args:
        name: Name of a registered environment, or None.
        version: Version of a registered environment, or None.
        python: The base interpreter. If nothing is installed, it runs the script itself. An absolute path, or with
            `docker_image` also a name on the image's PATH. None for the submitting interpreter.
        python_version: Version for conda, such as "3.11". None lets the solver choose.
        layered: Keep the base interpreter's packages and add only missing ones. False: only the named packages and their
            dependencies.
        user_managed: Use the interpreter unchanged, without installing.
        pip_packages: Requirements in pip's form. Local paths become absolute.
        pip_requirements: The text of a requirements file without includes (see `Environment.from_pip_requirements`).
        pip_constraints: Versions of packages in case they are needed, as for `pip install -c`.
        conda_packages: Match specs of conda packages.
        conda_channels: Names or URLs (also `file://`), the preferred channel first.
        environment_variables: Variables of every worker. Variables of the job override them.
        docker_image: Image of the workers' containers.
        shm_size: Size of the containers' /dev/shm, such as "2g".
        locked_pip: Exact versions ("einops==0.8.1"), used instead of pip's choice.
        locked_conda: Exact packages (URLs with `#sha256`), used instead of the solver's choice.

    Raises:
        EnvironmentSpecError: Values contradict each other, or a URL has a password.
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
        """Return whether all values are equal, also between this class and `paceline.Environment`."""
        if not isinstance(other, EnvironmentSpec):
            return NotImplemented
        # Compare the fields of this class, because a dataclass's own __eq__ never equates instances of two classes.
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(EnvironmentSpec))

    @property
    def uses_conda(self) -> bool:
        """Whether conda packages provide the interpreter."""
        return bool(self.conda_packages or self.locked_conda)

    @property
    def needs_build(self) -> bool:
        """Whether packages must be installed before the script runs."""
        return self.uses_conda or bool(self.pip_packages or (self.pip_requirements or "").strip() or self.locked_pip)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without fields that have their defaults."""
        values = asdict(self) | {"environment_variables": dict(self.environment_variables)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] not in (None, (), {}, False)}

    @classmethod
    def from_json(cls: type[Spec], data: Mapping[str, Any]) -> Spec:
        """Return the environment that `to_json` wrote.

        Raises:
            EnvironmentSpecError: A field is unknown to this version, or a value is invalid.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise EnvironmentSpecError(f"unknown fields of an environment {unknown}; known are {sorted(known)}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**values)
