"""Python environments, built from a job's packages and cached by content.

A public name is imported on first use, because nodes import parts of this package and must not need the libraries of
the resolvers.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.environments.sdk_packages import is_sdk_package, without_sdk_packages
    from paceline.job.environment import EnvironmentSpec
    from paceline.job.environment_rules import is_environment_name
    from paceline.system.plugins import version_of

_HOMES = {
    "paceline.environments.sdk_packages": ("is_sdk_package", "without_sdk_packages"),
    "paceline.job.environment": ("EnvironmentSpec",),
    "paceline.job.environment_rules": ("is_environment_name",),
    "paceline.system.plugins": ("version_of",),
}

__all__ = ["EnvironmentSpec", "is_environment_name", "is_sdk_package", "version_of", "without_sdk_packages"]

__getattr__ = face(__name__, _HOMES)
