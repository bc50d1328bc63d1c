"""The workspace's secrets (`azureml.core.keyvault`).

Each is a file that only its owner can read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.system.files import PRIVATE, read_json, write_json

if TYPE_CHECKING:
    from paceline.workspace import Workspace

__all__ = ["Keyvault"]


class Keyvault:
    """Secrets by name.

    They are not encrypted: every process that can read this user's files can read them.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._folder = Path(workspace.path) / "azureml" / "secrets"

    def set_secret(self, name: str, value: str) -> None:
        """Store a secret.

        Raises:
            UserErrorException: The name has characters other than letters, digits and `-`, or the value is not a
                string.
        """
        if not isinstance(value, str):
            raise UserErrorException(f"the secret {name!r} is a {type(value).__name__}; it must be a string.")
        file = self._file(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        write_json(file, value, mode=PRIVATE)

    def set_secrets(self, secrets_batch: dict[str, str]) -> None:
        for name, value in secrets_batch.items():
            self.set_secret(name, value)

    def get_secret(self, name: str) -> str | None:
        """Return a secret, or None if it does not exist."""
        return read_json(self._file(name))  # type: ignore[no-any-return]

    def get_secrets(self, secrets: list[str]) -> dict[str, str | None]:
        """Return secrets by name."""
        return {name: self.get_secret(name) for name in secrets}

    def delete_secret(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def delete_secrets(self, secrets: list[str]) -> None:
        for name in secrets:
            self.delete_secret(name)

    def list_secrets(self) -> list[dict[str, str]]:
        """Return `{"name": ...}` of each secret, without its value."""
        return [{"name": file.stem} for file in sorted(self._folder.glob("*.json"))]

    def _file(self, name: str) -> Path:
        if not isinstance(name, str) or not re.fullmatch(r"[0-9A-Za-z-]{1,127}", name):
            raise UserErrorException(f"{name!r} can't be a secret's name: letters, digits and '-'.")
        return self._folder / f"{name}.json"
