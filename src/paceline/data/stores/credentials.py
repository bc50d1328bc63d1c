"""Read the credentials of stores. A store's record has only the place of each secret.

    env:LAB_SECRET              an environment variable
    keyring:lab/me              the password of user "me" for service "lab" in the system's keyring (extra: keyring)
    file:~/.lab.json            the text of a file of mode 600; with #field, that field of the JSON object in it

While a store is open, a `Secrets` object holds the values, and removes them from every message.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from urllib.parse import parse_qsl

from paceline.errors import DataError
from paceline.job.secret_values import HIDDEN, PLACES, credentials_in, forms, hidden, is_place

# Names of fsspec options, headers and URL parameters that hold a secret.
_SECRET_NAME = re.compile(
    r"(?i)secret|passw|passphrase|token|credential|signature|authorization|cookie|api[_-]?key|access[_-]?key"
    r"|account[_-]?key|connection[_-]?string|sas|private[_-]?key|\bpkey\b|(^|[_-])(key|pwd|auth|sig)$"
)
#: Names that match the pattern above, but do not hold a secret.
_HARMLESS = frozenset({"key_filename", "anon", "token_type", "use_ssl", "host_key_policy", "credentials_file"})
#: Values of secret options that are harmless: gcsfs takes token="anon".
_HARMLESS_VALUES = frozenset({"anon", "cloud", "google_default", "cache", "browser"})

#: Variables that the stores' libraries read secrets from.
_LIBRARY_VARIABLES = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
    *("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_KEY", "AZURE_CLIENT_SECRET"),
)


class Secrets:
    """Secret values that are hidden in the repr and can't be pickled."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(values or {})
        self._others: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Secrets(of {', '.join(sorted({**self._values, **self._others})) or 'nothing'})"

    def __reduce__(self) -> str:
        # Refuse pickling, which would write the values to disk or network.
        raise TypeError("secrets are not pickled")

    def options(self) -> dict[str, str]:
        """Return each option's secret value, for the store's library only."""
        return dict(self._values)

    def add(self, name: str, value: str) -> None:
        """Add another secret value that `scrub` removes from messages."""
        self._others[name] = value

    def scrub(self, text: str) -> str:
        """Return the text without the secrets, even if URL-quoted or as a repr."""
        # Replace the longest secret first: it may contain a shorter secret, and its other characters would stay readable.
        for value in sorted({*self._values.values(), *self._others.values()}, key=len, reverse=True):
            for form in sorted(forms(value), key=len, reverse=True):
                # A secret of 1 or 2 characters occurs in many words, and masking would reveal it there: withhold the whole text.
                if len(form) >= 3:
                    text = text.replace(form, "***")
                elif form and form in text:
                    return "(the store's own message is withheld: it may hold a secret)"
        return text


def resolve(credentials: Mapping[str, str] | None, where: str) -> Secrets:
    """Read and return a store's secrets from places such as "env:LAB_SECRET".

    Args:
        credentials: Maps an option to a place. None: the store has no credentials.
        where: The store, for messages.

    Raises:
        DataError: A place is invalid or has no value, or is a file that other users may read.
    """
    secrets = Secrets({option: _read(option, place, where) for option, place in (credentials or {}).items()})
    # Messages may also contain secrets that the store's library has read from variables.
    for name in _LIBRARY_VARIABLES:
        if value := os.environ.get(name):
            secrets.add(name, value)
    return secrets


def check_credentials(credentials: Mapping[str, str] | None, where: str) -> None:
    """Raise DataError unless each credential names a place such as "env:LAB_SECRET".

    The message does not show an invalid place, because it may be the secret itself.
    """
    if credentials is None:
        return
    if not isinstance(credentials, Mapping):
        raise DataError(f"credentials of {where}: give a dictionary of option -> place, each {PLACES}.")
    for option, place in credentials.items():
        if not is_place(place):
            raise DataError(
                f"credential {option!r} of {where}: the value is not a place, and is not shown here in case it is the "
                f"secret itself. Secrets are never registered; give {PLACES}."
            )


def check_no_secrets(url: str, options: Mapping[str, object]) -> None:
    """Raise DataError if the URL or an option contains a secret."""
    shown = hidden_url(url)
    secret_parts = [f"the option {name!r}" for name in _secret_names(options)]
    if shown != url:
        secret_parts.append("the URL")
    if secret_parts:
        raise DataError(
            f"{' and '.join(secret_parts)} of the store {shown!r} would hold a secret in the clear, which Paceline "
            f"never writes. Name its place instead: credentials={{'option': place}}, each place {PLACES}."
        )


def hidden_url(url: str) -> str:
    """Return the URL without passwords, signatures and other secret parameters."""
    if "://" not in url:
        return HIDDEN if credentials_in(url) else url
    path, mark, query = hidden(url).partition("?")
    if mark and any(_is_secret(name) for name, _ in parse_qsl(query, keep_blank_values=True)):
        query = "***"
    return f"{path}{mark}{query}"


def _secret_names(options: Mapping[str, object], prefix: str = "") -> list[str]:
    names = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            names += _secret_names(value, f"{prefix}{name}.")
        elif isinstance(value, str) and ("://" in value or credentials_in(value)):
            names += [f"{prefix}{name}"] if credentials_in(value) or hidden_url(value) != value else []
        elif value not in (None, "", True, False) and str(value) not in _HARMLESS_VALUES and _is_secret(str(name)):
            names.append(f"{prefix}{name}")
    return names


def _is_secret(name: str) -> bool:
    return name.lower() not in _HARMLESS and _SECRET_NAME.search(name) is not None


def read_place(place: str) -> str:
    """Return the secret at a place such as "env:LAB_SECRET".

    Raises:
        DataError: The place has no value, or is a file that other users may read.
    """
    return _read_at(place, f"it is to be found at {place!r}, but")


def _read(option: str, place: str, where: str) -> str:
    # Check again: the record's file may have been edited by hand.
    check_credentials({option: place}, where)
    return _read_at(place, f"credential {option!r} of {where} is to be found at {place!r}, but")


def _read_at(place: str, context: str) -> str:
    kind, _, rest = place.partition(":")
    value = {"env": _from_environment, "keyring": _from_keyring, "file": _from_file}[kind](rest, context)
    if not value:
        raise DataError(f"{context} there is nothing in it. Put the value there.")
    return value


def _from_environment(name: str, context: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise DataError(f"{context} the environment has no variable {name!r}. Set it where `paceline` is called.")
    return value


def _from_keyring(rest: str, context: str) -> str:
    # Split at the last slash, because the name of a service may contain slashes.
    service, _, user = rest.rpartition("/")
    try:
        import keyring
    except ImportError as error:
        raise DataError(f"{context} keyring is not installed. Write: pip install 'paceline[keyring]'.") from error
    try:
        value = keyring.get_password(service, user)
    except Exception as error:
        # Each keyring backend raises its own exceptions. Their text may show the secret.
        raise DataError(
            f"{context} the keyring can't be read: {type(error).__name__}. Unlock it, or use env: or file:."
        ) from None
    if value is None:
        raise DataError(f"{context} the keyring has nothing there. Put it in with `keyring set {service} {user}`.")
    return str(value)


def _from_file(rest: str, context: str) -> str:
    name, mark, field = rest.partition("#")
    path = os.path.expanduser(name)
    try:
        # Use O_NONBLOCK, because opening a pipe without a writer would block forever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, encoding="utf-8") as file:
            # Check the open file: the path may name another file by now.
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{context} {path!r} is not a file. Give the path of a file.")
            if status.st_mode & 0o077:
                raise DataError(
                    f"{context} {path!r} has mode {stat.S_IMODE(status.st_mode):o}, so others may read it. "
                    f"Close it with `chmod 600 {path}`."
                )
            text = file.read()
    except OSError as error:
        raise DataError(f"{context} {path!r} can't be read: {error.strerror}. Make the file, with mode 600.") from error
    except UnicodeDecodeError:
        raise DataError(f"{context} {path!r} is not UTF-8. Save it as UTF-8.") from None
    if not mark:
        return text.strip()
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or not isinstance(data.get(field), str):
        raise DataError(f"{context} {path!r} is not a JSON object with a text field {field!r}. Add the field.")
    return str(data[field])
