"""Handle secret variables: the sources of their values, and detection of likely secrets.

A job has only the sources, such as "env:HF_TOKEN". `submit` reads the values. Workers get them in a file that only the
user can read (`RunFolder.secrets`). The run's end removes the file. docs/secrets.md describes each target.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

from paceline.errors import JobError

#: Kinds of sources of a secret's value, as for credentials of datastores (`paceline.data.stores.credentials`).
_KINDS = ("env", "keyring", "file")
PLACES = "'env:VARIABLE', 'keyring:service/user' or 'file:PATH' (mode 600, '#field' for one field of a JSON file)"

#: Text that is shown instead of a secret's value.
HIDDEN = "***"

# Match whole words between underscores: TOKENIZERS_PARALLELISM and MAX_TOKENS are not secrets.
_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|password|passwd|passphrase|apikey|api_key|access_key|private_key|secret_key|auth_key"
    r"|account_key|pat)(?:_|$)"
)
#: Endings of names of variables that describe a secret without holding it, such as TOKEN_FILE.
_HARMLESS_NAME = re.compile(r"(?i)_(?:file|path|dir|id|ids|name|type|url|count|limit|length|size|ttl|kind)$")
# Values of switches and numbers, such as HF_HUB_DISABLE_IMPLICIT_TOKEN=1, are not secrets.
_HARMLESS_VALUE = re.compile(r"(?i)|-?[0-9.]+|true|false|yes|no|on|off|none|null")
# Matches tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS and Google, a JWT, and a private key.
_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abeoprs]-[\w-]{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
# The user part of a URL: the text from "://" to the last "@" of the line, or to the last "@" before another URL. It has one of
# four forms: variables before a host; a password after a ":" (but not a port); a token with a character that no host name has,
# such as a space; or any other text without a "/", because a "/" would begin the path.
_USER_PART = re.compile(
    r"(?i)(?P<scheme>[a-z][a-z0-9+.-]{0,30})://"
    r"(?P<user>(?:[^:@/\s]*:)?(?:\$\{[A-Z0-9_]+\})+(?=@[\w.\[\]:-]+(?:[/\s]|$))"
    r"|[^/\s:@]*:(?!\d+(?:[/?#\s'\"`,;)]|$))(?:(?![a-z][a-z0-9+.-]{0,30}://)[^\n])*"
    r"|[\w.~%:\[\]${}-]*[^\w.~%:\[\]/?#@${}\n-](?:(?![a-z][a-z0-9+.-]{0,30}://)[^\n])*"
    r"|(?:(?![a-z][a-z0-9+.-]{0,30}://)[^/\n])*)"
    r"@(?!\s)"
)
# Matches a user and a password without a URL scheme: "me:password@host", also after "NAME=" and in a comma-separated list. Ports,
# IPv6 addresses, image digests and mail:ann@example.com must not match, because they contain no password.
_PASSWORD = re.compile(
    r"(?:^|[\s,;=])(?!mail(?:to)?:[^\s:@]+@)(?P<user>[^\s:@/=,;\[\"'(){}<>]+:(?!\s|//|\d+(?:[/?#\s'\"`,;)]|$)|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%\w+)?(?:[,\s]|$))"
    r"[^\n]+)@(?!\s|sha256:)"
)
#: Names of variables that hold addresses, perhaps with a password and without a scheme.
_ADDRESS_NAME = re.compile(r"(?i)(?:^|_)(?:proxy|url|uri|dsn|database|host|address|endpoint|server|index)(?:_|$)")
#: A user part without a secret: the name of a user or Azure container. For `_TOKEN_SCHEMES` it may be a token.
_USER_NAME = re.compile(r"[\w.~+%\\-]*")
_TOKEN_SCHEMES = ("http", "https", "s3", "s3a", "gs", "gcs")
#: A user part without a secret, because its variables are expanded later: "${USER}:${TOKEN}", "me:${TOKEN}".
_VARIABLES = re.compile(r"(?:[^:@/\s]*:)?(?:\$\{[A-Z0-9_]+\})+")
#: Characters that need no encoding in the user part (RFC 3986).
_ENCODED = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")


@dataclass(frozen=True)
class Secret:
    """A secret read at submission from `place`, such as "env:HF_TOKEN", and never recorded.

    Raises:
        JobError: The source is invalid; the message does not show it, because it may be the value.
    """

    place: str

    def __post_init__(self) -> None:
        check_place(self.place)


def secret(name: str) -> Secret:
    """Return a secret for an estimator's environment_variables.

    Args:
        name: A variable of the submitting program ("HF_TOKEN"), or a source: "env:HF_TOKEN", "keyring:service/user" or
            "file:~/.token" (mode 600; "#field" selects a field of a JSON file).

    Raises:
        JobError: The name is invalid; the message does not show it, because it may be the value.

    Examples:
        >>> script = pl.PyTorch(entry_script="train.py", environment_variables={"HF_TOKEN": pl.secret("HF_TOKEN")})
    """
    # A token such as hf_... could be taken for a variable's name and be recorded.
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and not _VALUE.fullmatch(name):
        return Secret(f"env:{name}")
    return Secret(name)


def check_place(place: object) -> None:
    """Check the form of a secret's source. The source may not exist here.

    Raises:
        JobError: The source is invalid; the message does not show it.
    """
    if not is_place(place):
        raise JobError(
            f"a secret is named by its place, {PLACES}, or by the name of a variable. The given text is neither, and is not "
            "shown here in case it is the secret itself."
        )


def is_place(place: object) -> bool:
    """Return whether this is a valid source of a secret's value."""
    kind, _, rest = place.partition(":") if isinstance(place, str) else ("", "", "")
    return kind in _KINDS and bool(rest) and (kind != "keyring" or "/" in rest)


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable is likely a secret, by name or value."""
    if _VALUE.fullmatch(value) or hidden(value) != value or (_ADDRESS_NAME.search(name) and credentials_in(value)):
        return True
    return bool(_NAME.search(name)) and not _HARMLESS_NAME.search(name) and not _HARMLESS_VALUE.fullmatch(value)


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with likely secrets hidden."""
    return {name: HIDDEN if looks_secret(name, value) else value for name, value in variables.items()}


def hidden(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace credentials in URLs and the given secret values by ***.

    In a URL, credentials are the text between the scheme and the last `@` before the path. A variable `${NAME}` stays. A
    user's name without a password stays too, except in URLs of web servers and buckets, where it may be a token.
    """
    known = {form for secret in secrets for form in forms(secret)}
    # Replace the longest value first: one value may be the beginning of another.
    for form in sorted(known, key=len, reverse=True):
        # Skip very short values, which occur in too many words.
        if len(form) >= 4:
            text = text.replace(form, HIDDEN)
    return _USER_PART.sub(lambda found: f"{found['scheme']}://{HIDDEN}@" if _is_credential(found) else found[0], text)


def credentials_in(value: str) -> list[str]:
    """Return the users and passwords in a variable that contains only URLs.

    For "https://me:pw@host" and "me:pw@host" these are ["me:pw", "pw"]. The value may be a comma-separated list.
    """
    if "@" not in value:
        return []
    users = [found["user"] for found in _USER_PART.finditer(value) if _is_credential(found)]
    users += [found["user"] for found in _PASSWORD.finditer(value) if not _VARIABLES.fullmatch(found["user"])]
    return [part for user in users for part in (user, *re.split(r"[\s,;:@=]+", user.partition(":")[2] or user))]


def forms(secret: str) -> set[str]:
    """Return the forms that a secret may have in output, such as JSON-encoded."""
    if not secret:
        return set()
    lines = {line.strip() for line in secret.splitlines()}
    found = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret), repr(secret)[1:-1], *lines}
    # uv shows URLs by Rust's url crate, which keeps some characters that Python percent-encodes.
    found |= {quote(secret, safe="!$%&'()*+,-._~"), quote(secret, safe="!$&'()*+,-._~")}
    return (found | {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}) - {""}


def encoded(value: str) -> str:
    """Return the value percent-encoded, if necessary, for a URL's user part."""
    return value if _ENCODED.fullmatch(value) else quote(value, safe="")


def with_encoded_user(text: str) -> str:
    """Return the text with users and passwords of its URLs percent-encoded."""

    def user_part(found: re.Match[str]) -> str:
        user, colon, password = found["user"].partition(":")
        return f"{found['scheme']}://{encoded(user)}{colon}{encoded(password)}@"

    return _USER_PART.sub(lambda found: user_part(found) if _is_credential(found) else found[0], text)


def _is_credential(found: re.Match[str]) -> bool:
    user, scheme = found["user"], found["scheme"].lower()
    is_name = not scheme.endswith(_TOKEN_SCHEMES) and _USER_NAME.fullmatch(user)
    return user not in ("", HIDDEN) and not is_name and not _VARIABLES.fullmatch(user)
