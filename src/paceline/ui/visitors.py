"""Visitors of a page with members: who they are, and which changes they may make.

Another user of the machine can send any header to a port. So the page uses a Unix socket, and the kernel names the user
of each connection to it. Only the user that runs the proxy may name another user in a header.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import Scope

from paceline.errors import FileNameError, RunNotFoundError, UserError
from paceline.runs import store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id, is_run_id
from paceline.runs.record import RunRecord, login_name
from paceline.system.lock_holder import user_name
from paceline.ui.config import UNIX, UiConfig
from paceline.ui.members import ADMIN, NAME, OWN, PREFIX, Accounts, MembersFile, log_change

#: Rule for a route that changes a run: admins may change all runs, and members of the role `OWN` may change their own runs.
MINE = "mine"
#: Route that changes data -> the lowest role that may use it, or `MINE`. Only admins may use routes that are missing here.
WRITES = {
    **{
        f"/runs/{{run_id}}/{verb}": MINE
        for verb in ["archive", "cancel", "delete", "more", "notes", "rename", "stacks", "tag"]
    },
    **{f"/runs/{{run_id}}/{verb}": OWN for verb in ("again", "rerun")},
    # A comment belongs to its author, not to the run's owner. So `permit` checks whether the member is the author.
    **{f"/runs/{{run_id}}/{verb}": OWN for verb in ("comment", "uncomment")},
    # For `/views` and `/actions`, `permit` and `permit_runs` make further checks.
    **dict.fromkeys(("/new", "/actions", "/views", "/services/{name}/call"), OWN),
}
_RULES = [(compile_path(path)[0], rule) for path, rule in WRITES.items()]
_ACCOUNT, _OWNER, _PROXY, _SOCKET = "token", "owner", "proxy", "socket"


@dataclass(frozen=True)
class Visitor:
    """A member who sends a request.

    origin: How the member was identified: by a service account's token, as the owner, by the proxy or by the socket.
    """

    name: str
    role: str
    origin: str

    @property
    def is_script(self) -> bool:
        """Return whether the visitor is a program, whose requests other sites can't forge."""
        return self.origin == _ACCOUNT

    def may(self, rule: str) -> bool:
        """Return whether the visitor's role permits a change that needs `rule` (`rule_of`)."""
        return self.role == ADMIN or (self.role == OWN and rule in (OWN, MINE))


#: The visitor in a workspace without a list of members. All visitors then have all rights.
ANYBODY = Visitor("", ADMIN, "")


class Visitors:
    """A check that identifies the sender of each request.

    Raises:
        UserError: The members file has an error.
    """

    def __init__(self, config: UiConfig) -> None:
        self._config, self._file = config, MembersFile(Path(config.members)) if config.members else None
        self._accounts, self._proxy_uid = Accounts(Path(config.workspace)), config.proxy_uid
        self._said = ""

    def of(self, scope: Scope) -> Visitor | None:
        """Return the sender of a request; None if the page's token decides about access.

        Raises:
            HTTPException: Invalid token or no name (401), sender is not a member (403), or error in the members file (503).
        """
        given = [value[7:] for value in _headers(scope, b"authorization") if value[:7].lower() == "bearer "]
        tokens = [token for token in given if token.startswith(PREFIX)]
        if tokens and self._file:
            return self._script(tokens[0])
        if self._file is None or not self._config.socket:
            return None
        kind, uid = scope.get("client") or ("", -1)
        if kind != UNIX:
            raise HTTPException(401, "The kernel does not say which user has opened the connection.")
        if self._config.user_header and uid == self._proxy_uid:
            names = _headers(scope, self._config.user_header.lower().encode())
            if len(names) != 1 or not NAME.fullmatch(names[0]):
                raise HTTPException(401, f"The proxy must send one name of a user in {self._config.user_header}.")
            visitor = Visitor(names[0], "", _PROXY)
        elif uid == os.geteuid():
            return self.owner
        elif self._config.user_header:
            raise HTTPException(403, "Only the proxy of this page may open this socket.")
        else:
            visitor = Visitor(user_name(uid), "", _SOCKET)
        role = self._role(visitor)
        if role is None:
            raise HTTPException(403, f"{visitor.name} is not a member of this page. Ask its owner.")
        return Visitor(visitor.name, role, visitor.origin)

    @property
    def owner(self) -> Visitor:
        """Return the user that runs the server, as an admin."""
        return Visitor(login_name(), ADMIN, _OWNER) if self._file else ANYBODY

    def is_still(self, visitor: Visitor) -> bool:
        """Return whether the visitor still has the same role."""
        try:
            return self._role(visitor) == visitor.role
        except HTTPException:
            return False

    def _script(self, token: str) -> Visitor:
        account = self._accounts.find(token)
        if account is None:
            raise HTTPException(401, "This token is wrong, or its account was removed. Ask an admin for a new one.")
        if account.is_expired:
            raise HTTPException(401, f"The token of {account.name} has expired. Ask an admin for a new one.")
        # A person's name can't contain a colon, so a service account never counts as the owner of a person's runs.
        return Visitor(f"{_ACCOUNT}:{account.name}", account.role, _ACCOUNT)

    def _role(self, visitor: Visitor) -> str | None:
        if visitor.origin == _OWNER or self._file is None:
            return ADMIN
        if visitor.origin == _ACCOUNT:
            account = self._accounts.get(visitor.name.partition(":")[2])
            return account.role if account and not account.is_expired else None
        try:
            return self._file.role(visitor.name)
        except UserError as error:
            if str(error) != self._said:
                self._said = str(error)
                print(
                    f"paceline: error: {error} No member has access until it is corrected.", file=sys.stderr, flush=True
                )
            raise HTTPException(503, "The members file of this page has an error. Tell its owner.") from None


def _headers(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("utf-8", "replace") for name, value in scope["headers"] if name == wanted]


def rule_of(path: str) -> str:
    """Return the lowest role that may POST to a path (`MINE`: the run's owner)."""
    return next((rule for pattern, rule in _RULES if pattern.fullmatch(path)), ADMIN)


def visitor_of(request: Request) -> Visitor:
    """Return the member who sends a request; `ANYBODY`, an admin, on pages without members."""
    visitor: Visitor = request.scope.get("paceline.visitor", ANYBODY)
    return visitor


def need(request: Request, rule: str) -> None:
    """Raise HTTPException (403) unless the sender's role permits a change (`Visitor.may`)."""
    visitor = visitor_of(request)
    if not visitor.may(rule):
        raise HTTPException(403, refusal(visitor))


def refusal(visitor: Visitor) -> str:
    """Return the error message for a change that the visitor's role forbids."""
    return f"{visitor.name} has the role {visitor.role}, which may not do this. Ask an admin of this page."


def may_change(request: Request, folder: RunFolder, record: RunRecord | None = None) -> bool:
    """Return whether the sender of a request may change this run."""
    visitor = visitor_of(request)
    if visitor.role == ADMIN:
        return True
    try:
        return visitor.may(MINE) and owner_of(folder, record, request.app.state.workspace_dir) == visitor.name
    except RunNotFoundError:
        return False


def shown_forms(request: Request, read_only: bool, record: object) -> dict[str, bool]:
    """Return which forms a page's visitor sees: `read_only`, `can_start` and `can_share`.

    record: The record of the page's run, if any.
    """
    visitor = visitor_of(request)
    is_admin = visitor.role == ADMIN
    is_own = isinstance(record, RunRecord) and may_change(request, RunFolder(Path(record.run_id)), record)
    return {
        "read_only": read_only or not (is_admin or is_own),
        "can_start": not read_only and visitor.may(OWN),
        "can_share": not read_only and is_admin,
    }


def owner_of(folder: RunFolder, record: RunRecord | None, workspace_dir: Path) -> str:
    """Return who submitted a run, or its sweep or pipeline; "" if unknown."""
    record = store.stored(folder) if record is None else record
    seen = {record.run_id}
    # Stop at an id that has occurred already, because two damaged records may name each other as the parent.
    while (above := record.parent_run_id) and is_run_id(above) and above not in seen:
        seen.add(above)
        if (folder_above := _place_of(above, workspace_dir)) is None:
            return ""
        record = store.stored(folder_above)
    return record.submitted_by


def permit(request: Request, form: Mapping[str, str], folder: RunFolder | None) -> None:
    """Log a member's change; raise an error for a forbidden change.

    folder: The run in the request's path, or None.

    Raises:
        HTTPException: This member may not make the change (403), or the log can't be written (503).
    """
    visitor, path = visitor_of(request), request.scope["path"]
    if path == "/views" and (form.get("action") != "save" or form.get("replace") == "1"):
        need(request, ADMIN)  # all members see a saved view, so only admins may change it
    if folder is not None:
        if rule_of(path) == MINE and not may_change(request, folder):
            raise HTTPException(403, _not_own(visitor, folder.run_id))
        if path.endswith("/uncomment") and visitor.role != ADMIN:
            found = tags_and_properties.read(folder.notes).comments.get(form.get("comment", ""))
            if found is not None and found.author != visitor.name:
                raise HTTPException(403, f"This is not a comment of {visitor.name}. Ask its author, or an admin.")
        # Replace an abbreviated id by the full id, so that the route's function uses the run that this function has checked.
        request.path_params["run_id"] = folder.run_id
    part, _, verb = path.rpartition("/")
    # Don't log "/actions" here, because `permit_runs` logs this change for each run in the form.
    if path != "/actions":
        _note(
            request, visitor, form.get("action", verb)[:80], request.path_params.get("run_id") or (part or path)[:500]
        )


def permit_runs(request: Request, action: str, run_ids: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return ids of runs that the member may change, and other runs' errors.

    Each permitted change is written to the log.
    """
    visitor = visitor_of(request)
    permitted, refused = [], []
    for run_id in run_ids:
        folder = None
        with contextlib.suppress(FileNameError):
            folder = _place_of(check_run_id(run_id), request.app.state.workspace_dir)
        if action == "rerun" or visitor.role == ADMIN or (folder is not None and may_change(request, folder)):
            permitted.append(run_id)
            _note(request, visitor, action, run_id[:500])
        else:
            refused.append({"run": run_id, "error": _not_own(visitor, run_id)})
    return permitted, refused


def _place_of(run_id: str, workspace_dir: Path) -> RunFolder | None:
    paths = (workspace_dir / name / run_id for name in ("runs", "trash"))
    return next((RunFolder(path) for path in paths if path.is_dir() and not path.is_symlink()), None)


def _not_own(visitor: Visitor, run_id: str) -> str:
    return f"{run_id[:300]} is not a run of {visitor.name}, who has the role own. Ask its owner, or an admin."


def _note(request: Request, visitor: Visitor, verb: str, on: str) -> None:
    if visitor is ANYBODY:
        return
    who = {"member": visitor.name, "role": visitor.role, "origin": visitor.origin}
    try:
        log_change(request.app.state.workspace_dir, verb=verb, on=on, **who)
    except OSError as error:
        raise HTTPException(503, f"The log of changes can't be written, so nothing was changed: {error}.") from error
