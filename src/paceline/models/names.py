"""The rules for names of models and of aliases, and the words that name a version: `digits`, `digits:3`, `digits@production`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paceline.errors import ModelError
from paceline.system.names import name_rule

#: The Azure SDK's own rule.
NAME = name_rule("._-", 255)
_ALIAS = name_rule("._-", 64)
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
LATEST = "latest"


@dataclass(frozen=True)
class ModelReference:
    """The words that name a version. version, alias: one of the two, or neither for the latest version."""

    name: str
    version: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        if self.alias is not None:
            return f"{self.name}@{self.alias}"
        return self.name if self.version is None else f"{self.name}:{self.version}"


def check_model_name(name: Any) -> str:
    """The same name.

    Raises:
        ModelError: not letters, digits, `.`, `_` and `-`, 255 at most, beginning with a letter or a digit.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ModelError(
            f"the model name {name!r}: give letters, digits, '.', '_' and '-', at most 255, beginning with a letter or a digit."
        )
    return name


def check_alias(alias: Any) -> str:
    """The same alias.

    Raises:
        ModelError: not letters, digits, `.`, `_` and `-`, 64 at most, beginning with a letter or a digit; or a word that
            looks like a version, which would mean two things.
    """
    if not isinstance(alias, str) or not _ALIAS.fullmatch(alias):
        raise ModelError(
            f"the alias {alias!r}: give letters, digits, '.', '_' and '-', at most 64, beginning with a letter or a digit, "
            "such as 'production'."
        )
    if alias.lower() == LATEST or re.fullmatch(r"[vV]?[0-9.]+", alias):
        raise ModelError(f"the alias {alias!r} looks like a version. Give a word, such as 'production'.")
    return alias


def check_version(version: Any) -> int:
    """The number of a version, given as one or in digits.

    Raises:
        ModelError: it is no whole number from 1 on.
    """
    # By the exact type, for True would pass for version 1.
    text = str(version) if type(version) in (int, str) else ""
    if not (text.isascii() and _VERSION.fullmatch(text)):
        raise ModelError(f"the version {version!r}: a version is a whole number from 1 on, such as 3.")
    return int(text)


def parse(text: Any) -> ModelReference:
    """The reference that these words stand for.

    Raises:
        ModelError: they are none of NAME, NAME:VERSION, NAME:latest and NAME@ALIAS.
    """
    if not isinstance(text, str) or (":" in text and "@" in text):
        raise ModelError(f"{text!r} names no model. Write NAME, NAME:VERSION or NAME@ALIAS, such as 'digits:3'.")
    if "@" in text:
        name, _, alias = text.partition("@")
        return ModelReference(check_model_name(name), alias=check_alias(alias))
    name, colon, version = text.partition(":")
    check_model_name(name)
    if not colon or version == LATEST:
        return ModelReference(name)
    return ModelReference(name, version=check_version(version))
