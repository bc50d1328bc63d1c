"""`paceline account`, as users type it."""

from __future__ import annotations

import datetime as dt

import pytest

from paceline.ui.members import log_change
from tests.cli.conftest import Cli


@pytest.mark.promise("account-tokens-expire")
def test_service_account_commands_add_list_and_remove_an_account_with_its_expiry(cli: Cli) -> None:
    assert "There is no service account" in cli("account", "list").stdout
    added = cli.json("account", "add", "nightly", "--role", "own", "--expires", "30d")
    assert added["token"]
    created, expires = (
        dt.datetime.fromisoformat(added[key].replace("Z", "+00:00")) for key in ("created_utc", "expires_utc")
    )
    assert expires - created == dt.timedelta(days=30)
    assert cli.json("account", "list") == [{key: value for key, value in added.items() if key != "token"}]
    assert f"nightly  own   {added['created_utc']}  {added['expires_utc']}\n" in cli("account", "list").stdout

    for wrong in ("0", "367d"):
        error = cli("account", "add", "other", "--expires", wrong, code=2).stderr
        assert f"--expires must be more than 0 and at most 366 days, got {wrong.strip('d')}." in error
    cli("account", "remove", "nightly")

    assert cli.json("account", "list") == []
    assert "there is no account 'nightly'" in cli("account", "remove", "nightly", code=2).stderr


def test_account_log_lists_changes_by_members_newest_first(cli: Cli) -> None:
    assert "No member has changed anything" in cli("account", "log").stdout
    for verb in ("cancel", "tag"):
        log_change(cli.folder / ".paceline", member="ann", role="admin", verb=verb, on="digits_1_2", origin="unix")
    assert [change["verb"] for change in cli.json("account", "log")] == ["tag", "cancel"]
    assert [change["verb"] for change in cli.json("account", "log", "-n", 1)] == ["tag"]
    assert "\x1b" not in cli("account", "log").stdout
