"""The configuration of a server: one JSON file, the argument of `python -m paceline.serving`.

The server reports its state in a file beside its configuration (`paceline.serving.state`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ServingError
from paceline.system.listening import is_loopback
from paceline.system.names import did_you_mean

#: Variable of the Azure SDK in `environment`: the source folder's path, relative to the script's working folder.
SOURCE_VARIABLE = "AZUREML_SOURCE_DIRECTORY"
LOG_LEVELS = ("debug", "info", "warning", "error")

# Pattern of a model's name, which becomes a part of URLs, paths and log lines.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model to serve: its name, version and files.

    path: The folder with the model's files, or a single file.
    hashes: Path of a file in the format of `sha256sum`, with paths below `path`. A model with changed, missing or extra
        files is not loaded. None checks nothing.
    framework: "sklearn", "onnx", "torchscript", "torch-export" or "pytorch", for a server without an entry script. None
        detects the framework by the files' endings.
    """

    name: str
    version: str
    path: str
    hashes: str | None = None
    framework: str | None = None

    def __post_init__(self) -> None:
        for what, text, rule in (("name", self.name, _NAME), ("version", self.version, _VERSION)):
            if not isinstance(text, str) or not rule.fullmatch(text):
                raise ServingError(
                    f"models: {what} {text!r} is not a {what} of a model. Write letters, digits, '.', '_' and '-', a letter or a "
                    "digit first."
                )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server.

    entry_script: Path of the scoring script below `source_dir`. None serves the single entry of `models` directly.
    source_dir: The first entry of the script's `sys.path`.
    working_dir: The folder where the script runs; None for `source_dir`.
    python: Interpreter of the model processes, which needs only the script's packages; None for the server's own.
    environment: Variables of the model processes in addition to the server's own.
    host: Name or address of this machine at which to listen. Any address but loopback needs `keys_file`.
    port: Port to listen at; 0 for a free port, which the server's state reports.
    listen_fd: Descriptor of an inherited listening socket, used in place of host and port; None without such a socket.
    heartbeat_fd: Descriptor of an inherited pipe, into which the server writes a byte each second; None writes nothing.
    workers: Number of model processes.
    threads: OMP_NUM_THREADS of each model process; None for the number of cores divided by `workers`.
    max_batch: Maximum number of requests in one call of the model; 1 if each call gets one request.
    max_queue: Maximum number of waiting requests. Further requests get status 503.
    timeout_s: Seconds that the model may take. Then the request gets status 504, and the server replaces the process.
    load_timeout_s: Seconds in which a model process must load the model and run `init()`.
    keys_file: JSON file with "primary" and "secondary" keys; a request needs one of them. None if requests need no key.
    tls_cert, tls_key: PEM files of the server's certificate and its private key; None serves plain HTTP.
    allow_origins: Origins of other sites whose pages may send requests ("https://app.example"), or "*" for all sites.
    memory_limit_bytes: Resident memory above which the server replaces a model process; None for no limit.
    drain_s: Seconds after SIGTERM in which the server still answers open requests.
    is_temporary: Whether to remove the configuration's folder at the end.
    revision: Any text that names this configuration. The server's state has the revision that is served.
    """

    name: str
    models: tuple[ServedModel, ...] = ()
    entry_script: str | None = None
    source_dir: str | None = None
    working_dir: str | None = None
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None
    heartbeat_fd: int | None = None
    workers: int = 1
    threads: int | None = None
    max_batch: int = 16
    max_queue: int = 256
    max_body_bytes: int = 64 << 20
    timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    keys_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    allow_origins: Sequence[str] = ()
    memory_limit_bytes: int | None = None
    log_level: str = "info"
    drain_s: float = 30.0
    is_temporary: bool = False
    revision: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ServingError(
                f"name={self.name!r} is not a name of a service. Write letters, digits, '.', '_' and '-', a letter "
                "or a digit first."
            )
        for name, least in (
            *(("workers", 1), ("max_batch", 1), ("max_queue", 1), ("max_body_bytes", 1), ("port", 0)),
            *(("threads", 1), ("listen_fd", 0), ("heartbeat_fd", 0), ("memory_limit_bytes", 1)),
        ):
            _check_number(name, getattr(self, name), least, int)
        for name, shortest_s in (("timeout_s", 0.001), ("load_timeout_s", 0.001), ("drain_s", 0)):
            _check_number(name, getattr(self, name), shortest_s, (int, float))
        if self.port > 65535:
            raise ServingError(f"port={self.port} is not a port. Write 1 to 65535, or 0 for a free one.")
        if self.log_level not in LOG_LEVELS:
            raise ServingError(
                f"log_level={self.log_level!r} is not one of "
                f"{', '.join(LOG_LEVELS)}.{did_you_mean(str(self.log_level), LOG_LEVELS)}"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ServingError("tls_cert and tls_key go together: give both files, or neither.")
        if self.listen_fd is None and self.keys_file is None and not is_loopback(self.host):
            raise ServingError(
                f"host={self.host!r} can be reached from other machines, so its clients need keys. Give keys "
                "(--keys FILE), or listen at 127.0.0.1."
            )
        if isinstance(self.allow_origins, str) or not all(isinstance(each, str) for each in self.allow_origins):
            raise ServingError(f"allow_origins={self.allow_origins!r} is not a list of texts.")
        object.__setattr__(self, "allow_origins", tuple(self.allow_origins))
        for origin in self.allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ServingError(
                    f"allow_origins has {origin!r}, which is not an origin. Write scheme, host and port as a browser's address "
                    "line has them, without a path, such as 'https://app.example', or '*' for every page."
                )
        if self.entry_script is not None and self.source_dir is None:
            raise ServingError(f"entry_script={self.entry_script!r} without source_dir, the folder that holds it.")
        if self.entry_script is None and len(self.models) != 1:
            raise ServingError(
                f"{len(self.models)} models and no entry_script. A model without a script is served alone; several need a "
                "script that says how."
            )
        identities = [(model.name, model.version) for model in self.models]
        if len(set(identities)) < len(identities):
            raise ServingError(
                f"models: one is named twice: {', '.join(':'.join(identity) for identity in sorted(identities))}."
            )

    @property
    def version(self) -> str:
        """The version of the first model, which the OpenAPI documents show."""
        return self.models[0].version if self.models else "1.0"

    def to_json(self) -> dict[str, object]:
        return {
            **{each.name: getattr(self, each.name) for each in dataclasses.fields(self)},
            "models": [dataclasses.asdict(model) for model in self.models],
            "environment": dict(self.environment),
        }

    @classmethod
    def from_json(cls, value: object) -> ServerConfig:
        """Build the configuration from a JSON value.

        Raises:
            ServingError: A key is unknown or missing, or a value is not valid.
        """
        settings = _keys(cls, value, "the configuration")
        models = settings.get("models", [])
        if not isinstance(models, (list, tuple)):
            raise ServingError(f"models={models!r} is not a list.")
        settings["models"] = tuple(ServedModel(**_keys(ServedModel, model, "a model")) for model in models)
        return cls(**settings)


def read_config(path: Path) -> ServerConfig:
    """Read a configuration file.

    Raises:
        ServingError: The file is unreadable, not JSON, or not valid.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ServingError(f"the configuration {str(path)!r} can't be read: {error}") from error
    return ServerConfig.from_json(value)


def _check_number(name: str, value: Any, least: float, kind: Any) -> None:
    if value is None and name in ("threads", "listen_fd", "heartbeat_fd", "memory_limit_bytes"):
        return
    if not isinstance(value, kind) or isinstance(value, bool) or not value >= least:
        whole = "a whole number" if kind is int else "a number"
        raise ServingError(f"{name}={value!r} is not {whole} of {least} or more.")


def _keys(cls: type[ServedModel | ServerConfig], value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ServingError(f"{what} is {type(value).__name__}, not an object of JSON.")
    fields = {each.name: each for each in dataclasses.fields(cls)}
    if unknown := sorted(set(value) - set(fields)):
        raise ServingError(f"{what} has no key {unknown[0]!r}. There are {', '.join(fields)}.")
    for name, each in fields.items():
        if name not in value and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise ServingError(f"{what} lacks the key {name!r}.")
    return dict(value)


def read(config_file: Path) -> ServerConfig:
    """Read a configuration file. Relative paths in it start at the file's folder.

    Raises:
        ServingError: The configuration is not valid. The contents of other files are not checked.
    """
    return absolute(read_config(config_file), config_file.parent)


def absolute(config: ServerConfig, folder: Path) -> ServerConfig:
    """Return the configuration with relative paths resolved against `folder`."""

    def full(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(folder / path)

    for name in ("source_dir", "working_dir"):
        setting = full(getattr(config, name))
        if setting is not None and not os.path.isdir(setting):
            raise ServingError(f"{name}={getattr(config, name)!r}: there is no such folder.")
    for name in ("tls_cert", "tls_key"):
        setting = full(getattr(config, name))
        if setting is not None and not os.path.isfile(setting):
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
