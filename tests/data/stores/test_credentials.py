"""Credentials: the three places, the refused values, and that no output shows them."""

from __future__ import annotations

import json
import pickle
import sys
import types

import pytest

from paceline.data.stores.credentials import Secrets, check_credentials, check_no_secrets, hidden_url, resolve
from paceline.errors import DataError

SECRET = "s3cr3t/+ of=the tests"


def test_credential_reference_with_env_is_resolved_to_the_value_of_its_variable(monkeypatch):
    monkeypatch.setenv("LAB_KEY", SECRET)
    assert resolve({"key": "env:LAB_KEY"}, "lab").options() == {"key": SECRET}


def test_secret_is_read_from_a_private_file_or_json_field(tmp_path):
    (tmp_path / "plain").write_text(f"{SECRET}\n")
    (tmp_path / "fields").write_text(json.dumps({"password": SECRET}))
    for name in ("plain", "fields"):
        (tmp_path / name).chmod(0o600)
    places = {"a": f"file:{tmp_path}/plain", "b": f"file:{tmp_path}/fields#password"}
    assert resolve(places, "lab").options() == {"a": SECRET, "b": SECRET}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606])
def test_secret_file_readable_by_others_is_refused_with_its_mode_and_the_chmod_command(tmp_path, mode):
    (tmp_path / "open").write_text(SECRET)
    (tmp_path / "open").chmod(mode)
    with pytest.raises(DataError, match=f"has mode {mode:o}.*chmod 600") as caught:
        resolve({"key": f"file:{tmp_path}/open"}, "lab")
    assert SECRET not in str(caught.value)


def test_a_secret_is_read_from_the_keyring(monkeypatch):
    kept = {("lab", "me"): SECRET}
    fake = types.SimpleNamespace(get_password=lambda service, user: kept.get((service, user)))
    monkeypatch.setitem(sys.modules, "keyring", fake)
    assert resolve({"key": "keyring:lab/me"}, "lab").options() == {"key": SECRET}
    with pytest.raises(DataError, match="keyring set lab you"):
        resolve({"key": "keyring:lab/you"}, "lab")


def test_missing_keyring_package_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(DataError, match=r"pip install 'paceline\[keyring\]'"):
        resolve({"key": "keyring:lab/me"}, "lab")


@pytest.mark.parametrize("place", ["env:NO_SUCH", "file:/no/such/file", "file:/"])
def test_error_names_a_secret_reference_whose_variable_or_file_cannot_be_read(place):
    with pytest.raises(DataError, match=place):
        resolve({"key": place}, "lab")


@pytest.mark.parametrize("place", [SECRET, f"secret:{SECRET}", "env:", "keyring:lab", 7, ""])
def test_invalid_secret_reference_is_refused_without_showing_it(place):
    with pytest.raises(DataError, match="not shown here") as caught:
        check_credentials({"key": place}, "lab")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *({name: SECRET} for name in ("key", "secret", "password", "token", "sas_token", "account_key", "passphrase")),
        *({name: SECRET} for name in ("connection_string", "aws_secret_access_key", "client_secret", "Authorization")),
        {"client_kwargs": {"aws_secret_access_key": SECRET}},
        {"client_kwargs": {"headers": {"Authorization": SECRET}}},
        {"endpoint_url": f"http://me:{SECRET}@host"},
        {"endpoint_url": f"me:{SECRET}@host"},
        {"token": {"private_key": SECRET}},
    ],
    ids=str,
)
def test_an_option_that_holds_a_secret_is_refused_and_not_shown(options):
    with pytest.raises(DataError, match="in the clear") as caught:
        check_no_secrets("s3://bucket", options)
    assert SECRET not in str(caught.value)
    assert "env:VARIABLE" in str(caught.value)


#: URL schemes. For Azure and SFTP, a user without a password is a container or a login. For the other schemes it is a token.
TAKERS = ("s3", "gs", "gcs", "http", "https", "abfs", "az", "sftp")


@pytest.mark.promise("user-url-data-refused-may")
@pytest.mark.parametrize(
    "url",
    [
        f"sftp://me:{SECRET}@host/x",
        "https://s3cr3t%2F+ of=the tests@host/x",
        *(f"{scheme}://{user}@bucket/x" for scheme in TAKERS for user in (f"me:{SECRET}", "s3cr3t +/of=the:tests")),
        *(f"{scheme}://s3cr3t@bucket/x" for scheme in TAKERS if scheme not in ("abfs", "az", "sftp")),
        f"me:{SECRET}@host/x",
        f"https://host/x?sig={SECRET}&a=b",
        f"https://h/?X-Amz-Signature={SECRET}",
    ],
)
def test_a_url_that_holds_a_secret_is_refused_and_not_shown(url):
    assert "s3cr3t" not in hidden_url(url)
    with pytest.raises(DataError, match="the URL of the store") as caught:
        check_no_secrets(url, {})
    assert SECRET not in str(caught.value)


def test_datastore_urls_and_options_without_secrets_pass_the_secret_check():
    options = {
        "endpoint_url": "http://host:9000",
        "anon": True,
        "key_filename": "~/.ssh/id",
        "token": "anon",
        "profile": "lab",
    }
    check_no_secrets("abfs://container@account.dfs.core.windows.net/x", options)
    check_no_secrets("https://host:8080/a@b/c", {})
    check_no_secrets("az://container@account.blob.core.windows.net/x/a@b", {})
    check_no_secrets("s3://bucket/a b:c@d", {})
    check_no_secrets("/data/me:a@b", {})
    check_no_secrets("sftp://me@host/x", {"client_kwargs": {"region_name": "eu"}})


def test_secrets_are_removed_from_texts_in_quoted_and_url_forms():
    from urllib.parse import quote, quote_plus

    secrets = Secrets({"password": SECRET})
    for form in (SECRET, quote(SECRET), quote(SECRET, safe=""), quote_plus(SECRET), repr(SECRET)):
        assert secrets.scrub(f"refused: {form}!").replace("'", "") == "refused: ***!"


def test_log_text_that_contains_a_one_letter_secret_is_withheld_whole():
    assert "withheld" in Secrets({"password": "x"}).scrub("axb")


def test_secrets_are_neither_shown_nor_pickled():
    secrets = Secrets({"password": SECRET})
    assert SECRET not in repr(secrets) + str(secrets) + f"{secrets}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secrets)
