"""The configuration as the server takes it: its paths absolute, and what they name there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from paceline.errors import ServingError
from paceline.serving.config import ServerConfig, read_config


def read(config_file: Path) -> ServerConfig:
    """The configuration of a file; paths that are not absolute are below its folder.

    Raises:
        ServingError: it can't be served; what is to be read from other files is not looked at.
    """
    return absolute(read_config(config_file), config_file.parent)


def absolute(config: ServerConfig, folder: Path) -> ServerConfig:
    """The same with absolute paths. folder: of those that are not.

    Raises:
        ServingError: there is no such folder, or no such file of a certificate.
    """

    def full(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(folder / path)

    for name in ("source_dir", "working_dir"):
        given = full(getattr(config, name))
        if given is not None and not os.path.isdir(given):
            raise ServingError(f"{name}={getattr(config, name)!r}: there is no such folder.")
    for name in ("tls_cert", "tls_key"):
        given = full(getattr(config, name))
        if given is not None and not os.path.isfile(given):
            raise ServingError(f"{name}={getattr(config, name)!r}: there is no such file.")
    return dataclasses.replace(
        config,
        models=tuple(
            dataclasses.replace(model, path=str(full(model.path)), hashes=full(model.hashes)) for model in config.models
        ),
        source_dir=full(config.source_dir),
        working_dir=full(config.working_dir),
        keys_file=full(config.keys_file),
        tls_cert=full(config.tls_cert),
        tls_key=full(config.tls_key),
    )
