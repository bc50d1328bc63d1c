"""Variables of a job whose values are not recorded: where a value is found, and what looks like one that should be so.

A job holds places alone. `submit` reads the values, and they go to the workers by a file that only the user can read
(`RunFolder.secrets`) and that the run's end removes; docs/secrets.md says where they are on each target.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

from paceline.errors import JobError

#: The places of a value, as credentials of datastores have them (`paceline.data.stores.credentials`).
_KINDS = ("env", "keyring", "file")
PLACES = "'env:VARIABLE', 'keyring:service/user' or 'file:PATH' (mode 600, '#field' for one field of a JSON file)"

#: What stands where a value would be shown.
HIDDEN = "***"

# Between underscores: TOKENIZERS_PARALLELISM and MAX_TOKENS are no secrets.
_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|password|passwd|passphrase|apikey|api_key|access_key|private_key|secret_key|auth_key"
    r"|account_key|pat)(?:_|$)"
)
#: Endings of names that say what is known of a secret, not the secret.
_HARMLESS_NAME = re.compile(r"(?i)_(?:file|path|dir|id|ids|name|type|url|count|limit|length|size|ttl|kind)$")
# Switches and numbers: HF_HUB_DISABLE_IMPLICIT_TOKEN=1 has a secret's name, and holds none.
_HARMLESS_VALUE = re.compile(r"(?i)|-?[0-9.]+|true|false|yes|no|on|off|none|null")
# The forms that services give to their tokens: Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS and Google; then a JWT, a
# private key, and a URL with a password in it.
_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abeoprs]-[\w-]{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
# The user's part of a URL, up to the last "@" of the line or before the next URL. Four forms: variables before a host; a ":"
# begins a password, which may hold any character, "/", "@" and blanks too (a port is no password); a character that no host's
# name has, such as a blank, is of a token, which may hold any other; without these the first "/" begins the path.
_USER_PART = re.compile(
    r"(?i)(?P<scheme>[a-z][a-z0-9+.-]{0,30})://"
    r"(?P<user>(?:[^:@/\s]*:)?(?:\$\{[A-Z0-9_]+\})+(?=@[\w.\[\]:-]+(?:[/\s]|$))"
    r"|[^/\s:@]*:(?!\d+(?:[/?#\s'\"`,;)]|$))(?:(?![a-z][a-z0-9+.-]{0,30}://)[^\n])*"
    r"|[\w.~%:\[\]${}-]*[^\w.~%:\[\]/?#@${}\n-](?:(?![a-z][a-z0-9+.-]{0,30}://)[^\n])*"
    r"|(?:(?![a-z][a-z0-9+.-]{0,30}://)[^/\n])*)"
    r"@(?!\s)"
)
# The same without a scheme: "me:password@host", also behind "NAME=" and in a list with commas. A port, an IPv6 address, an
# image's digest and mail:ann@example.com are no passwords.
_PASSWORD = re.compile(
    r"(?:^|[\s,;=])(?!mail(?:to)?:[^\s:@]+@)(?P<user>[^\s:@/=,;\[\"'(){}<>]+:(?!\s|//|\d+(?:[/?#\s'\"`,;)]|$)|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%\w+)?(?:[,\s]|$))"
    r"[^\n]+)@(?!\s|sha256:)"
)
#: Names of variables whose values are addresses: there a password may stand without a scheme.
_ADDRESS_NAME = re.compile(r"(?i)(?:^|_)(?:proxy|url|uri|dsn|database|host|address|endpoint|server|index)(?:_|$)")
#: A user whose name stands alone in a URL, or an Azure container: where no token is a user.
_USER_NAME = re.compile(r"[\w.~+%\\-]*")
_TOKEN_SCHEMES = ("http", "https", "s3", "s3a", "gs", "gcs")
#: A user's part whose secrets are variables, which are filled in where the URL is used: "${USER}:${TOKEN}", "me:${TOKEN}".
_VARIABLES = re.compile(r"(?:[^:@/\s]*:)?(?:\$\{[A-Z0-9_]+\})+")
#: What may stand in the user's part as it is (RFC 3986): a value of these alone is in its encoded form already.
_ENCODED = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")


@dataclass(frozen=True)
class Secret:
    """A value that is read when a job is submitted and that no record holds. place: one of `PLACES`.

    Raises:
        JobError: it is no place; what was given is not shown, in case it is the value itself.
    """

    place: str

    def __post_init__(self) -> None:
        check_place(self.place)


def secret(name: str) -> Secret:
    """The value of a variable of the submitting program, or what lies at a place, for an estimator's environment_variables.

        PyTorch(..., environment_variables={"HF_TOKEN": pl.secret("HF_TOKEN")})

    name: of the variable ("HF_TOKEN"), or a place as credentials of datastores have it: "env:HF_TOKEN", "keyring:service/user",
        "file:~/.token" (mode 600; "#field" takes one field of a JSON file).

    Raises:
        JobError: it is neither; it is not shown, in case it is the value itself.
    """
    # A token such as hf_... would pass for a variable's name, and be written down as one; below it is refused without being
    # shown.
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and not _VALUE.fullmatch(name):
        return Secret(f"env:{name}")
    return Secret(name)


def check_place(place: object) -> None:
    """Nothing, if this is a place; it need not hold anything yet.

    Raises:
        JobError: it is none, and is not shown.
    """
    if not is_place(place):
        raise JobError(
            f"a secret is named by its place, {PLACES}, or by the name of a variable. What was given is neither, and is not "
            "shown here in case it is the secret itself."
        )


def is_place(place: object) -> bool:
    """True for the name of a place, whatever it holds."""
    kind, _, rest = place.partition(":") if isinstance(place, str) else ("", "", "")
    return kind in _KINDS and bool(rest) and (kind != "keyring" or "/" in rest)


def looks_secret(name: str, value: str) -> bool:
    """True if a variable of this name and value is likely a secret: by its name (`HF_TOKEN`), or the form of the value
    (`hf_...`, `AKIA...`, a URL with a password).
    """
    if _VALUE.fullmatch(value) or hidden(value) != value or (_ADDRESS_NAME.search(name) and credentials_in(value)):
        return True
    return bool(_NAME.search(name)) and not _HARMLESS_NAME.search(name) and not _HARMLESS_VALUE.fullmatch(value)


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables as they may be shown: values that look like secrets are hidden."""
    return {name: HIDDEN if looks_secret(name, value) else value for name, value in variables.items()}


def hidden(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text with *** in the place of credentials in URLs, and of the given values in each form they may take.

    What stands between a scheme and the last `@` before the path is hidden unless it is a user's name alone; in a web address
    and a bucket's a user alone is hidden too, for it may be a token. `${NAME}` stays: nothing has been put in its place.
    """
    known = {form for secret in secrets for form in forms(secret)}
    # Longest first, for one may be the beginning of another.
    for form in sorted(known, key=len, reverse=True):
        # Very short values are in too many words.
        if len(form) >= 4:
            text = text.replace(form, HIDDEN)
    return _USER_PART.sub(lambda found: f"{found['scheme']}://{HIDDEN}@" if _is_credential(found) else found[0], text)


def credentials_in(value: str) -> list[str]:
    """Return what `me:password@host` has before its last `@`, in a URL or without a scheme, and the parts of the password.

    For a value that a user has given, not for text around one: of a list with commas a message may show parts alone.
    """
    if "@" not in value:
        return []
    users = [found["user"] for found in _USER_PART.finditer(value) if _is_credential(found)]
    users += [found["user"] for found in _PASSWORD.finditer(value) if not _VARIABLES.fullmatch(found["user"])]
    return [part for user in users for part in (user, *re.split(r"[\s,;:@=]+", user.partition(":")[2] or user))]


def forms(secret: str) -> set[str]:
    """Return the forms in which programs print a value: as it is, line by line, in a URL, in JSON and as a repr."""
    if not secret:
        return set()
    lines = {line.strip() for line in secret.splitlines()}
    found = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret), repr(secret)[1:-1], *lines}
    # The url crate, which uv uses, leaves some characters that Python encodes.
    found |= {quote(secret, safe="!$%&'()*+,-._~"), quote(secret, safe="!$&'()*+,-._~")}
    return (found | {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}) - {""}


def encoded(value: str) -> str:
    """Return the value percent-encoded for a URL's user part; one that could stand there as it is stays."""
    return value if _ENCODED.fullmatch(value) else quote(value, safe="")


def with_encoded_user(text: str) -> str:
    """Return the text with the user and the password of its URLs percent-encoded."""

    def user_part(found: re.Match[str]) -> str:
        user, colon, password = found["user"].partition(":")
        return f"{found['scheme']}://{encoded(user)}{colon}{encoded(password)}@"

    return _USER_PART.sub(lambda found: user_part(found) if _is_credential(found) else found[0], text)


def _is_credential(found: re.Match[str]) -> bool:
    user, scheme = found["user"], found["scheme"].lower()
    is_name = not scheme.endswith(_TOKEN_SCHEMES) and _USER_NAME.fullmatch(user)
    return user not in ("", HIDDEN) and not is_name and not _VARIABLES.fullmatch(user)
