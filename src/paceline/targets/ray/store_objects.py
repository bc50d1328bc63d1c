"""Read, write, encrypt and check the objects of a datastore through which runs travel."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import socket
import stat
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.stores.filesystem import Store
from paceline.data.transfer.upload import put_files
from paceline.errors import TargetError
from paceline.system.scratch import Scratch

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: Bytes of an AES-GCM nonce (NIST SP 800-38D).
_NONCE_BYTES = 12


def exists(store: Store, path: str) -> bool:
    if store.kind == "local":
        return store.local(path).exists()
    with store.translating(f"looking for {path!r}"):
        return bool(store.fs.exists(store.full(path)))


def get(store: Store, path: str) -> bytes | None:
    """Return an object's bytes, or None if it does not exist."""
    if store.kind == "local":
        try:
            return store.local(path).read_bytes()
        except FileNotFoundError:
            return None
    with store.translating(f"reading {path!r}"):
        try:
            data: bytes = store.fs.cat_file(store.full(path))
            return data
        except FileNotFoundError:
            return None


def put(store: Store, path: str, data: bytes) -> None:
    """Store an object atomically in the datastore."""
    with Scratch("ray") as folder:
        file = folder / "object"
        file.write_bytes(data)
        put_files(store, "", [(path, file)])


def remove(store: Store, path: str) -> None:
    if store.kind == "local":
        store.local(path).unlink(missing_ok=True)
    else:
        store.fs.rm_file(store.full(path))


def unpack(data: bytes, folder: Path) -> None:
    """Extract an archive of untrusted content into a new folder.

    Raises:
        TargetError: A name or a link leads out of the folder, or an entry is not a file, folder or link.
    """
    # Check the entries in this loop: the filter "data" is missing in early releases of Python 3.10, and removes permissions.
    options: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    linked = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            if (why := _wrong_with(member, folder)) is not None:
                raise TargetError(f"the archive of the run has the name {member.name!r}, which {why}.")
            member.mode &= 0o777  # remove the setuid and setgid bits
            archive.extract(member, folder, **options)
            if member.issym():
                linked.append(member)
    # Entries inside linked folders were refused before. So check only that the targets of links are inside the folder.
    top = os.path.realpath(folder)
    for member in linked:
        if not f"{os.path.realpath(folder / member.name)}/".startswith(f"{top}/"):
            raise TargetError(
                f"the archive of the run has the name {member.name!r}, which is a link that leads outside, to "
                f"{member.linkname!r}."
            )


def tree_sha256(folder: Path) -> str:
    """Return a hash of a folder's files, links and executable bits, in hexadecimal.

    A hash of an archive would not do, because two archives of the same folder may differ.
    """
    digest = hashlib.sha256()
    top = os.path.realpath(folder)
    for directory, folders, files in os.walk(top):
        folders.sort()
        for name in sorted((*folders, *files)):
            path = os.path.join(directory, name)
            mode, content = os.lstat(path).st_mode, hashlib.sha256()
            if stat.S_ISLNK(mode):
                content.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    while data := file.read(1 << 20):
                        content.update(data)
            # Separate the values by NUL, which no file name can contain.
            about = f"\0{stat.S_IFMT(mode)} {mode & 0o100} {content.hexdigest()}\0"
            digest.update(os.fsencode(os.path.relpath(path, top)) + about.encode())
    return digest.hexdigest()


def _wrong_with(member: tarfile.TarInfo, folder: Path) -> str | None:
    if _leaves(member.name, folder):
        return "leads outside"
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return "is of no file, folder or link"
    if (folder / member.name).is_symlink():
        return "is there already, as a link"
    if (member.issym() and os.path.isabs(member.linkname)) or (
        member.islnk() and (_leaves(member.linkname, folder) or (folder / member.linkname).is_symlink())
    ):
        return f"is a link that leads outside, to {member.linkname!r}"
    return None


def _leaves(name: str, folder: Path) -> bool:
    parts = name.split("/")
    return (
        name.startswith("/")
        or ".." in parts
        or any((folder / "/".join(parts[:count])).is_symlink() for count in range(1, len(parts)))
    )


def encrypted(data: bytes, key: bytes, name: str) -> bytes:
    """Return `data` encrypted with AES-256-GCM, bound to the object's name.

    Raises:
        TargetError: This Python has no `cryptography`.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _cipher(key).encrypt(nonce, data, name.encode())


def decrypted(data: bytes, key: bytes, name: str) -> bytes | None:
    """Return an object's data; None if it has another key or name.

    Raises:
        TargetError: This Python has no `cryptography`.
    """
    cipher = _cipher(key)
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], name.encode())
    except (InvalidTag, ValueError):  # the data was changed or cut off
        return None


def can_encrypt() -> bool:
    """Return whether this Python has `cryptography`, which encryption needs."""
    try:
        _cipher(bytes(32))
    except TargetError:
        return False
    return True


def _cipher(key: bytes) -> AESGCM:
    # Import this here, because only runs with secrets and `paceline exec` need the package `cryptography`.
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise TargetError(
            f"secrets and commands go through a datastore encrypted, for which {sys.executable} on {socket.gethostname()} needs "
            "cryptography. Install it there: pip install 'cryptography>=42'."
        ) from error
    return AESGCM(key)
