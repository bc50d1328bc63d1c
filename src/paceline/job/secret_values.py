"""Variables of a job whose values are not recorded: where a value is found, and what looks like one that should be so.

A job holds places alone. `submit` reads the values, and they go to the workers by a file that only the user can read
(`RunFolder.secrets`) and that the run's end removes; docs/secrets.md says where they are on each target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
    r"|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@\S*"
)


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
    (`hf_...`, `AKIA...`, a URL with a password)."""
    if _VALUE.fullmatch(value):
        return True
    return bool(_NAME.search(name)) and not _HARMLESS_NAME.search(name) and not _HARMLESS_VALUE.fullmatch(value)


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables as they may be shown: values that look like secrets are hidden."""
    return {name: HIDDEN if looks_secret(name, value) else value for name, value in variables.items()}
