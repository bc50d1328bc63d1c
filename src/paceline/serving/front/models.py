"""Check models' files by their hashes, and link them where scoring scripts expect them."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from paceline.errors import ServingError
from paceline.serving.config import ServedModel, ServerConfig

_PIECE = 1 << 20
_TICK_NS = 2_000_000_000


#: (device, inode, size, time of change) of a file -> its digest, so that unchanged files are not read again.
_known: dict[tuple[int, ...], str] = {}


def verify(config: ServerConfig) -> None:
    """Compare the files of each model with the model's list of hashes.

    Raises:
        ServingError: A file is changed, missing or not listed, or the list is unreadable.
    """
    for model in config.models:
        _verify(model)


def _verify(model: ServedModel) -> None:
    where = f"model {model.name}:{model.version}"
    if not os.path.exists(model.path):
        raise ServingError(f"{where}: there is nothing at {model.path!r}.")
    if model.hashes is None:
        return
    wanted = _listed(model)
    for name in sorted(wanted):
        path = model.path if os.path.isfile(model.path) else os.path.join(model.path, name)
        try:
            actual = digest(path)
        except OSError as error:
            raise ServingError(f"{where}: the file {name!r} can't be read: {error.strerror}.") from error
        if actual != wanted[name]:
            raise ServingError(
                f"{where}: the file {name!r} has changed since its registration (its SHA-256 is {actual[:12]}..., it was "
                f"{wanted[name][:12]}...). Register the model again, or restore the file."
            )
    if os.path.isdir(model.path) and (extra := sorted(set(_files(model.path)) - set(wanted))):
        raise ServingError(f"{where}: the file {extra[0]!r} is not one of those that were registered. Remove it.")


def digest(path: str) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    sha256 = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        stamp = _stamp(file.fileno())
        if stamp in _known:
            return _known[stamp]
        while piece := file.read(_PIECE):
            sha256.update(piece)
        # Do not cache the digest of a file that changed during the read, or within the clock's resolution.
        if _stamp(file.fileno()) == stamp and time.time_ns() - stamp[3] > _TICK_NS:
            _known[stamp] = sha256.hexdigest()
    return sha256.hexdigest()


def _stamp(fd: int) -> tuple[int, int, int, int]:
    status = os.fstat(fd)
    # Use ctime, because a program can reset mtime.
    return (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def lay_out(config: ServerConfig, folder: Path) -> str | None:
    """Create `azureml-models` with links to the models. Return the value of AZUREML_MODEL_DIR.

    `azureml-models` is created in `folder`, with the Azure SDK's layout. The result is None without models.
    """
    if not config.models:
        return None
    root = folder / "azureml-models"
    for model in config.models:
        place = root / model.name / model.version
        target = Path(model.path).absolute()
        if target.is_file():
            place.mkdir(parents=True, exist_ok=True)
            place = place / target.name
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_name(f".{place.name}.{os.getpid()}")
        beside.symlink_to(target, target_is_directory=target.is_dir())
        # Replace a previous configuration's link by a rename, because `symlink_to` fails if the name exists.
        os.replace(beside, place)
    return str(root if len(config.models) > 1 else root / config.models[0].name / config.models[0].version)


def _listed(model: ServedModel) -> dict[str, str]:
    wanted = {}
    try:
        text = Path(str(model.hashes)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ServingError(f"{model.name}:{model.version}: hashes={model.hashes!r} can't be read: {error}") from error
    for line in text.splitlines():
        digest_hex, _, name = line.partition("  ")
        if len(digest_hex) != 64 or not name or name.startswith("/") or ".." in name.split("/"):
            raise ServingError(
                f"model {model.name}:{model.version}: hashes={model.hashes!r} has the line {line!r}, which is not a SHA-256, two "
                "spaces and a path."
            )
        wanted[name] = digest_hex
    return wanted


def _files(folder: str) -> list[str]:
    return [os.path.relpath(os.path.join(base, name), folder) for base, _, names in os.walk(folder) for name in names]
