"""account add, list, remove, log: service accounts of the web page, and a log of the changes that members make on the page."""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline.cli.common import print_json, print_list
from paceline.cli.options import JSON, Duration, VerbOption, takes
from paceline.runs.record import utc_at
from paceline.ui.members import ACTION, OWN, Account, Accounts, last_changes
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import AccountRow

_NAME = VerbOption("name", "The account.", needed=True)
_ROLE = VerbOption("--role", "Role of the account: view, own or admin.", "ROLE", default=OWN)
_EXPIRES = VerbOption(
    "--expires",
    "Time until the token expires; default: 30d.",
    type=Duration(unit="d"),
    name="valid_s",
    default=30 * 86400.0,
)


@takes(_NAME, _ROLE, _EXPIRES, JSON)
def add(*, name: str, role: str, valid_s: float, as_json: bool) -> None:
    """Make a service account for scripts, and print its token."""
    account, token = Accounts(Workspace.from_config().path).add(name, role, valid_s)
    row = _row(account)
    if as_json:
        print_json({**row, "token": token})
        return
    print(token)
    print(f"The token of {name} expires {row['expires_utc']}. Copy it now: it is not stored.", file=sys.stderr)


@takes(JSON)
def list_accounts(*, as_json: bool) -> None:
    """List the service accounts of the page."""
    print_list(
        Accounts(Workspace.from_config().path).all(),
        {
            "ACCOUNT": lambda account: account.name,
            "ROLE": lambda account: account.role,
            "CREATED": lambda account: _row(account)["created_utc"],
            "EXPIRES": lambda account: _row(account)["expires_utc"] + " (over)" * account.is_expired,
        },
        as_json=as_json,
        to_json=_row,
        none="There is no service account. `paceline account add NAME` makes one.",
    )


@takes(_NAME)
def remove(*, name: str) -> None:
    """End a service account, whose token is refused from now on."""
    Accounts(Workspace.from_config().path).remove(name)


@takes(VerbOption("-n --limit", "Most changes to print.", "N", int, least=1, default=25), JSON)
def log(*, limit: int, as_json: bool) -> None:
    """Print which members changed what on the page, newest first."""
    headings = ("TIME", "MEMBER", "ROLE", "CHANGE", "OF", "BY")
    print_list(
        last_changes(Workspace.from_config().path, limit),
        {heading: itemgetter(name) for heading, name in zip(headings, ACTION, strict=True)},
        as_json=as_json,
        to_json=dict,
        none="No member has changed anything.",
    )


def _row(account: Account) -> AccountRow:
    return {
        "name": account.name,
        "role": account.role,
        "created_utc": utc_at(account.made),
        "expires_utc": utc_at(account.expires),
    }


verbs = {"add": add, "list": list_accounts, "remove": remove, "log": log}
