"""The workspace's secrets (`azureml.core.keyvault`).

Each secret is a file that only its owner can read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.system.registry import Documents

if TYPE_CHECKING:
    from paceline import Workspace

__all__ = ["Keyvault"]

_NAME = re.compile(r"[0-9A-Za-z-]{1,127}")


class Keyvault:
    """Secrets by name, not encrypted: any process of this user can read them."""

    def __init__(self, workspace: Workspace) -> None:
        self._kept = Documents(Path(workspace.path) / "azureml" / "secrets", _NAME, mode=0o600)

    def set_secret(self, name: str, value: str) -> None:
        """Store a secret.

        Raises:
            UserErrorException: The name has characters other than letters, digits and `-`, or the value is no string.
        """
        if not isinstance(value, str):
            raise UserErrorException(f"the secret {name!r} is a {type(value).__name__}; it must be a string.")
        _check(name)
        self._kept.folder.mkdir(parents=True, exist_ok=True)
        self._kept.folder.chmod(0o700)
        self._kept.put(name, value)

    def set_secrets(self, secrets_batch: dict[str, str]) -> None:
        for name, value in secrets_batch.items():
            self.set_secret(name, value)

    def get_secret(self, name: str) -> str | None:
        """Return a secret, or None if it does not exist."""
        return self._kept.read(_check(name))  # type: ignore[no-any-return]

    def get_secrets(self, secrets: list[str]) -> dict[str, str | None]:
        return {name: self.get_secret(name) for name in secrets}

    def delete_secret(self, name: str) -> None:
        self._kept.remove(_check(name))

    def delete_secrets(self, secrets: list[str]) -> None:
        for name in secrets:
            self.delete_secret(name)

    def list_secrets(self) -> list[dict[str, str]]:
        """Return `{"name": ...}` of each secret, without its value."""
        return [{"name": name} for name in self._kept.names()]


def _check(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserErrorException(f"{name!r} can't be a secret's name: letters, digits and '-'.")
    return name
