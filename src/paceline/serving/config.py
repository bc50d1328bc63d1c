"""What a server serves and how: one JSON file, which `python -m paceline.serving CONFIG.json` is given.

Whoever starts the server writes the file. The server answers in a file of its own beside it (`paceline.serving.state`).
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

#: A variable of `environment`: the source's folder as seen from the script's working folder. The Azure SDK's name.
SOURCE_VARIABLE = "AZUREML_SOURCE_DIRECTORY"
LOG_LEVELS = ("debug", "info", "warning", "error")

# A name is a part of URLs, of folders and of log lines.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model's files.

    path: the folder with the files, or the one file.
    hashes: a file with a line for each of the model's files, as `sha256sum` writes it: the digest, two spaces, the path below
        `path`. The model is not loaded where a file differs, is missing, or is there beside them. None: nothing is compared.
    framework: "sklearn", "onnx", "torchscript", "torch-export" or "pytorch", for a server without an entry script; None: by
        the files' endings.
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
                    f"models: {what} {text!r} is no {what} of a model. Write letters, digits, '.', '_' and '-', a letter or a "
                    "digit first."
                )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server serves and how.

    entry_script: the scoring script, below `source_dir`; None: the one model is served as it is.
    source_dir: stands first in the script's `sys.path`. working_dir: where the script runs; default: `source_dir`.
    python: the interpreter of the model processes, which need nothing but what the script needs; None: the server's own.
    environment: variables of the model processes beside the server's own.
    host: a name or an address of this machine. Any but this machine's own loopback needs `keys_file`.
    port: 0 takes a free one; the server's state says which. listen_fd: a socket that listens already, which the server has
        inherited; host and port then say nothing. beat_fd: a pipe that it has inherited and writes a byte into each second.
    workers: model processes. threads: of each, by OMP_NUM_THREADS; None: the machine's cores divided by `workers`.
    max_batch: requests that are given to the model together, where it can take several; 1: always one.
    max_queue: requests that wait; one more is answered 503.
    timeout_s: seconds for the model to answer; then 504, and the process is replaced.
    load_timeout_s: seconds for a model process to load and run `init()`.
    keys_file: JSON with "primary" and "secondary", either of which a request may bring; None: no key is asked for.
    tls_cert, tls_key: PEM files.
    allow_origins: pages of other sites that a browser lets ask and read ("https://app.example"), "*" for all.
    memory_limit_bytes: resident size at which a model process is replaced.
    drain_s: seconds that requests have to end in after SIGTERM.
    is_temporary: the folder of the configuration is removed in the end.
    revision: any text; the state says which revision is being served, or why it is not.
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
    beat_fd: int | None = None
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
                f"name={self.name!r} is no name of a service. Write letters, digits, '.', '_' and '-', a letter or a digit first."
            )
        for name, least in (
            *(("workers", 1), ("max_batch", 1), ("max_queue", 1), ("max_body_bytes", 1), ("port", 0)),
            *(("threads", 1), ("listen_fd", 0), ("beat_fd", 0), ("memory_limit_bytes", 1)),
        ):
            _check_number(name, getattr(self, name), least, int)
        for name in ("timeout_s", "load_timeout_s", "drain_s"):
            _check_number(name, getattr(self, name), 0, (int, float))
        if self.port > 65535:
            raise ServingError(f"port={self.port} is no port. Write 1 to 65535, or 0 for a free one.")
        if self.log_level not in LOG_LEVELS:
            raise ServingError(
                f"log_level={self.log_level!r} is none of {', '.join(LOG_LEVELS)}.{did_you_mean(str(self.log_level), LOG_LEVELS)}"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ServingError("tls_cert and tls_key go together: give both files, or neither.")
        if self.listen_fd is None and self.keys_file is None and not is_loopback(self.host):
            raise ServingError(
                f"host={self.host!r} can be reached from other machines, so its clients need keys. Give keys "
                "(--keys FILE), or listen at 127.0.0.1."
            )
        if isinstance(self.allow_origins, str) or not all(isinstance(each, str) for each in self.allow_origins):
            raise ServingError(f"allow_origins={self.allow_origins!r} is no list of texts.")
        object.__setattr__(self, "allow_origins", tuple(self.allow_origins))
        for origin in self.allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ServingError(
                    f"allow_origins has {origin!r}, which is no origin. Write scheme, host and port as a browser's address "
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
            raise ServingError(f"models: one is named twice: {', '.join(':'.join(one) for one in sorted(identities))}.")

    def to_json(self) -> dict[str, Any]:
        return {
            **{each.name: getattr(self, each.name) for each in dataclasses.fields(self)},
            "models": [dataclasses.asdict(model) for model in self.models],
            "environment": dict(self.environment),
        }

    @classmethod
    def from_json(cls, value: Any) -> ServerConfig:
        """The configuration of this JSON value.

        Raises:
            ServingError: a key is unknown or missing, or a value is wrong.
        """
        given = _keys(cls, value, "the configuration")
        models = given.get("models", [])
        if not isinstance(models, (list, tuple)):
            raise ServingError(f"models={models!r} is no list.")
        given["models"] = tuple(ServedModel(**_keys(ServedModel, model, "a model")) for model in models)
        return cls(**given)


def read_config(path: Path) -> ServerConfig:
    """The configuration in a file.

    Raises:
        ServingError: it can't be read, is no JSON, or says something wrong.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ServingError(f"the configuration {str(path)!r} can't be read: {error}") from error
    return ServerConfig.from_json(value)


def _check_number(name: str, value: Any, least: int, kind: Any) -> None:
    if value is None and name in ("threads", "listen_fd", "beat_fd", "memory_limit_bytes"):
        return
    if not isinstance(value, kind) or isinstance(value, bool) or not value >= least:
        whole = "a whole number" if kind is int else "a number"
        raise ServingError(f"{name}={value!r} is not {whole} of {least} or more.")


def _keys(cls: Any, value: Any, what: str) -> dict[str, Any]:
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
