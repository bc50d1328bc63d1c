"""The members of a page: their roles, service accounts, and a log of their changes.

The members file has a line for each name. Names may be in quotes.

    ann = admin    # may change everything
    bob = own      # may start runs, and change own runs
    * = view       # all others who can log in see everything, and change nothing
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.logs import last_lines
from paceline.runs.record import utc_now
from paceline.system.files import PRIVATE, append_line, make_own, names_in, write_json
from paceline.system.names import did_you_mean
from paceline.ui.shares import digest_of

VIEW, OWN, ADMIN = ROLES = ("view", "own", "admin")
#: Pattern of a member's name, which a proxy or the kernel reports. "*" is excluded, so that no user can log in as "*".
NAME = re.compile(r"[\w.@+-]{1,200}", re.ASCII)
_ROLES_TEXT = "view, own or admin"
#: Prefix of a service account's token; maximum number of seconds for which a token may be valid.
PREFIX, _MOST_S = "paceline_", 366 * 86400
_LINE = re.compile(rf"""(["']?)(?P<name>\*|{NAME.pattern})\1\s*=\s*(["']?)(?P<role>view|own|admin)\3""", re.ASCII)
#: Fields of a line in the log of changes. "on" is the changed run or part of the workspace. "origin" is how the member logged in.
ACTION = ("time_utc", "member", "role", "verb", "on", "origin")
_ACCOUNT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MOST_BYTES = 1 << 20


class MembersFile:
    """The file with the members' roles, which `role` reads again after each change.

    Raises:
        UserError: The file has an error, or other users can write to it. The method `role` raises this error too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[tuple[int, ...], dict[str, str]] = ((), {})
        self.role("")

    def role(self, name: str) -> str | None:
        """Return a user's role, or None if the user is not a member."""
        try:
            fd = _open_own(self._path)
        except OSError as error:
            reason = "it is a link. Name the file itself" if self._path.is_symlink() else error.strerror or error
            raise UserError(f"--members {str(self._path)!r}: {reason}.") from error
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            version = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
            if version != self._read[0]:
                self._read = version, self._parsed(file.read().decode("utf-8", "replace"))
        roles = self._read[1]
        return roles.get(name, roles.get("*"))

    def _parsed(self, text: str) -> dict[str, str]:
        roles: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not (line := line.partition("#")[0].strip()):
                continue
            at, found = f"--members {str(self._path)!r}, line {number}:", _LINE.fullmatch(line)
            if found is None:
                raise UserError(
                    f"{at} {line[:80]!r} must be NAME = ROLE. A name has letters, digits and . _ @ + -, a role is {_ROLES_TEXT}."
                )
            if found["name"] in roles:
                raise UserError(f"{at} {found['name']!r} has a role already.")
            roles[found["name"]] = found["role"]
        return roles


def _open_own(path: Path) -> int:
    """Open a file that only this user or root can write. Return its descriptor.

    Raises:
        OSError: The file is a link, is too large, belongs to another user, or others can write to it or replace it.
    """
    above = os.stat(path.parent)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    problems = (
        (not stat.S_ISREG(found.st_mode), "it is not a file"),
        (found.st_size > _MOST_BYTES, "it has more than 1 MiB"),
        (found.st_uid not in (0, os.geteuid()), f"it belongs to another user (number {found.st_uid})"),
        (found.st_mode & 0o022, "other users can write to it. Call chmod go-w on it"),
        (above.st_mode & 0o1002 == 0o002, "everybody can replace it. Call chmod o-w on its folder"),
    )
    for is_wrong, problem in problems:
        if is_wrong:
            os.close(fd)
            raise PermissionError(problem)
    return fd


@dataclass(frozen=True, kw_only=True)
class Account:
    """A service account. Its token lets a program use the page.

    Attributes:
        digest: SHA-256, in hex, of the second part of the account's token.
        made, expires: Times of creation and expiry in seconds since 1970.
    """

    name: str
    role: str
    digest: str
    made: float
    expires: float

    @property
    def is_expired(self) -> bool:
        return self.expires <= time.time()


class Accounts:
    """A workspace's service accounts, stored as files of mode 0600 without tokens."""

    def __init__(self, workspace_dir: Path) -> None:
        self._folder = workspace_dir / "ui" / "accounts"

    def add(self, name: str, role: str, valid_s: float) -> tuple[Account, str]:
        """Create a service account. Return it with its token, which is not stored.

        Raises:
            UserError: The name, role or validity in seconds is invalid, or an account of this name exists.
        """
        path = self._path(name)
        if role not in ROLES:
            raise UserError(f"--role {role[:80]!r} must be {_ROLES_TEXT}.{did_you_mean(role, ROLES)}")
        if not 0 < valid_s <= _MOST_S:
            raise UserError(f"--expires must be more than 0 and at most 366 days, got {valid_s / 86400:g}.")
        if path.exists():
            raise UserError(f"there is an account {name!r} already. Remove it first: paceline account remove {name}")
        secret, now = secrets.token_urlsafe(32), time.time()
        account = Account(name=name, role=role, digest=digest_of(secret), made=now, expires=now + valid_s)
        make_own(self._folder.parent)
        make_own(self._folder)
        write_json(path, asdict(account), mode=PRIVATE)
        return account, f"{PREFIX}{name}.{secret}"

    def find(self, token: str) -> Account | None:
        """Return the service account with this token, possibly expired, or None."""
        name, _, secret = token.removeprefix(PREFIX).partition(".")
        account = self.get(name)
        return (
            account if account and secrets.compare_digest(account.digest.encode(), digest_of(secret).encode()) else None
        )

    def get(self, name: str) -> Account | None:
        data = None
        with contextlib.suppress(OSError, ValueError), open(_open_own(self._path(name)), "rb") as file:
            data = json.loads(file.read())
        match data:
            case {"role": str(role), "digest": str(digest), "made": float(made), "expires": float(expires)} if (
                role in ROLES and 0 < expires - made <= _MOST_S
            ):
                return Account(name=name, role=role, digest=digest, made=made, expires=expires)
        return None

    def all(self) -> list[Account]:
        """Return the workspace's service accounts, sorted by name."""
        found = (self.get(name.removesuffix(".json")) for name in sorted(names_in(self._folder)))
        return [account for account in found if account]

    def remove(self, name: str) -> None:
        """Remove a service account; its token is invalid from now on.

        Raises:
            UserError: No account has this name.
        """
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            known = [account.name for account in self.all()]
            raise UserError(f"there is no account {name[:80]!r}.{did_you_mean(name, known)}") from None

    def _path(self, name: str) -> Path:
        if not _ACCOUNT.fullmatch(name):
            raise UserError(f"the account {name[:80]!r} must have lower-case letters, digits and `-`, at most 63.")
        return self._folder / f"{name}.json"


def log_path(workspace_dir: Path) -> Path:
    """Return the path of the append-only log of members' changes."""
    return workspace_dir / "ui" / "members.jsonl"


def log_change(workspace_dir: Path, **action: str) -> None:
    """Append the time and `action`'s fields to the log of members' changes.

    Raises:
        OSError: The line can't be written, or others can write to the folder.
    """
    make_own(log_path(workspace_dir).parent)
    append_line(log_path(workspace_dir), {"time_utc": utc_now(), **action})


def last_changes(workspace_dir: Path, most: int) -> list[dict[str, str]]:
    """Return the newest lines of the log of members' changes, newest first."""
    found = []
    for line in reversed(last_lines(log_path(workspace_dir), most, window=1 << 22)):
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case dict() as action if action.keys() == {*ACTION}:
                    found.append({name: str(action[name]) for name in ACTION})
    return found
