"""account add, list, remove, log: service accounts of the page, and the log of its members."""

from __future__ import annotations

import sys
import time

from paceline.cli.common import print_table
from paceline.cli.options import Duration, VerbOption, takes
from paceline.ui.members import ACTION, OWN, Accounts, last_changes
from paceline.workspace import Workspace

_NAME = VerbOption("name", "The account.", needed=True)
_ROLE = VerbOption("--role", "Role of the account: view, own or admin.", "ROLE", default=OWN)
_EXPIRES = VerbOption(
    "--expires",
    "Time until the token expires; default: 30d.",
    type=Duration(unit="d"),
    name="valid_s",
    default=30 * 86400.0,
)


@takes(_NAME, _ROLE, _EXPIRES)
def add(*, name: str, role: str, valid_s: float) -> None:
    """Make a service account for scripts, and print its token."""
    account, token = Accounts(Workspace.from_config().path).add(name, role, valid_s)
    print(token)
    print(f"The token of {name} expires {_text(account.expires)}. Copy it now: it is not stored.", file=sys.stderr)


@takes()
def list_accounts() -> None:
    """List the service accounts of the page."""
    accounts = Accounts(Workspace.from_config().path).all()
    rows = [(one.name, one.role, _text(one.made), _text(one.expires) + " (over)" * one.is_expired) for one in accounts]
    print_table(("ACCOUNT", "ROLE", "MADE", "EXPIRES"), rows)


@takes(_NAME)
def remove(*, name: str) -> None:
    """End a service account, whose token is refused from now on."""
    Accounts(Workspace.from_config().path).remove(name)


@takes(VerbOption("-n --limit", "Most changes to print.", "N", int, least=1, default=25))
def log(*, limit: int) -> None:
    """Print which members changed what on the page, newest first."""
    rows = [[change[name] for name in ACTION] for change in last_changes(Workspace.from_config().path, limit)]
    print_table(("TIME", "MEMBER", "ROLE", "CHANGE", "OF", "BY"), rows)


def _text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


verbs = {"add": add, "list": list_accounts, "remove": remove, "log": log}
