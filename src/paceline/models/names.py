"""Rules for names of models and aliases, and references such as `digits:3`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import ModelError
from paceline.system.names import name_rule

#: Pattern for a model's name, by the Azure SDK's rule.
NAME = name_rule("._-", 255)
_ALIAS = name_rule("._-", 64)
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
LATEST = "latest"


@dataclass(frozen=True)
class ModelReference:
    """A parsed reference: a model's name with a version, an alias, or neither."""

    name: str
    version: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        if self.alias is not None:
            return f"{self.name}@{self.alias}"
        return self.name if self.version is None else f"{self.name}:{self.version}"


def check_model_name(name: object) -> str:
    """Return a model's name, or raise ModelError if it breaks the naming rule."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ModelError(
            f"the model name {name!r}: give letters, digits, '.', '_' and '-', at most 255, beginning with a letter or a digit."
        )
    return name


def check_alias(alias: object) -> str:
    """Return an alias, or raise ModelError if it breaks the naming rule."""
    if not isinstance(alias, str) or not _ALIAS.fullmatch(alias):
        raise ModelError(
            f"the alias {alias!r}: give letters, digits, '.', '_' and '-', at most 64, beginning with a letter or a digit, "
            "such as 'production'."
        )
    if alias.lower() == LATEST or re.fullmatch(r"[vV]?[0-9.]+", alias):
        raise ModelError(f"the alias {alias!r} looks like a version. Give a word, such as 'production'.")
    return alias


def check_version(version: object) -> int:
    """Return a model's version number as an int, or raise ModelError."""
    # Check the exact type: True would pass for version 1.
    text = str(version) if type(version) in (int, str) else ""
    if not (text.isascii() and _VERSION.fullmatch(text)):
        raise ModelError(f"the version {version!r}: a version is a whole number from 1 on, such as 3.")
    return int(text)


def parse(text: object) -> ModelReference:
    """Convert NAME, NAME:VERSION, NAME:latest or NAME@ALIAS to a `ModelReference`, or raise ModelError."""
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


def reference(name: object, version: int | str | None, alias: str | None) -> ModelReference:
    """Return the reference for a name with an optional version or alias.

    `name` may be a whole reference, such as "digits:3", if `version` and `alias` are None.

    Raises:
        ModelError: A value is invalid, or two values name a version.
    """
    meant = parse(name)
    if version is None and alias is None:
        return meant
    if version is not None and alias is not None:
        raise ModelError(f"version={version!r} and alias={alias!r}: give one of the two.")
    if meant != ModelReference(meant.name):
        raise ModelError(f"{name!r} says which version already. Give the name alone, or no version and no alias.")
    if alias is not None:
        return ModelReference(meant.name, alias=check_alias(alias))
    return ModelReference(meant.name, version=None if version == LATEST else check_version(version))
