"""The checked settings of a Ray target, with defaults from Ray's own variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import TargetError
from paceline.job.secret_values import hidden
from paceline.remote.wire import SILENCE_S
from paceline.targets.options import PRICES, SILENCE, Option, SettingValues, check_settings

OPTIONS = (
    Option("address", "URL of the cluster's dashboard, such as http://head:8265, or auto", default="auto"),
    Option("token_file", "file of this machine that holds the cluster's token (mode 600)", type=Path),
    Option("token_env", "environment variable that holds the cluster's token"),
    Option("headers", "HTTP header for a proxy before the cluster, as 'Name: text' or 'Name: env:VARIABLE'", type=list),
    Option("python", "interpreter on the nodes for scripts that name none"),
    Option("cpus_per_worker", "CPUs of Ray's for each worker", type=float, default=1.0, least=1e-4),
    Option("gpus_per_worker", "GPUs of Ray's for each worker with use_gpu", type=int, default=1, least=1),
    Option("resources", "further resource of Ray's for each node, as NAME=AMOUNT", type=list),
    Option(
        "shared",
        "whether the cluster sees this machine's workspace under the same path",
        choices=("auto", "yes", "no"),
        default="auto",
    ),
    Option("datastore", "datastore of the workspace by which runs travel where no folder is shared"),
    Option("folder", "on the nodes, for runs and snapshots where no folder is shared"),
    Option(
        "patience_s",
        "seconds to wait for nodes when the cluster, as it is, can't hold the job",
        type=float,
        default=60.0,
        least=0,
    ),
    Option(
        "autoscaling",
        "whether the cluster grows when jobs wait, so that no job is too large for it",
        type=bool,
        default=False,
    ),
    SILENCE,
    *PRICES,
)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *(.*)")
#: Pattern of headers with secret values. Settings can't contain these values, only the names of variables that contain them.
_SECRET = re.compile(r"auth|cookie|token|key|secret|password", re.IGNORECASE)
_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
#: Environment variables and file from which Ray reads its token: https://docs.ray.io/en/latest/ray-security/token-auth.html
_TOKEN_VARIABLE, _TOKEN_PATH_VARIABLE, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """The checked settings of a Ray target.

    Attributes:
        resources: The amount of each of Ray's resources per node.
        datastore: The datastore through which runs are transferred; None if the cluster shares a folder with this machine.
    """

    name: str
    address: str
    token_file: str | None = None
    token_env: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    cpus_per_worker: float = 1.0
    gpus_per_worker: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    datastore: str | None = None
    folder: str | None = None
    patience_s: float = 60.0
    autoscaling: bool = False
    silence_s: float = SILENCE_S
    core_price: float | None = None
    gpu_price: float | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the cluster is expected to share the workspace's folder."""
        return self.datastore is None


def read_settings(name: str, settings: SettingValues) -> RaySettings:
    """Return the settings of the target `name`.

    Raises:
        TargetError: A setting is unknown or wrong.
    """
    values = check_settings("ray", OPTIONS, settings, name)
    shared, datastore = values.pop("shared"), values.pop("datastore")
    if shared == "no" and datastore is None:
        raise TargetError(
            f"compute target {name!r}: shared=no needs a datastore that this machine and the cluster reach: set datastore."
        )
    if values["token_env"] and not _VARIABLE.fullmatch(values["token_env"]):
        raise TargetError(
            f"compute target {name!r}: token_env is not a name of an environment variable, and is not shown here in case it "
            "is the token itself. Put the token into a variable and give that one's name."
        )
    for setting in ("python", "folder"):
        if values[setting] and not os.path.isabs(values[setting]):
            raise TargetError(f"compute target {name!r}: {setting}={values[setting]!r} is not an absolute path.")
    return RaySettings(
        **{
            **values,
            "name": name,
            "address": _address(name, values["address"]),
            "headers": _headers(name, values["headers"] or []),
            "resources": _resources(name, values["resources"] or []),
            "datastore": datastore if shared != "yes" else None,
        }
    )


def own_folder() -> str:
    """Return the default folder on this node for the user's runs."""
    return f"/tmp/paceline-{os.getuid()}"


def token(settings: RaySettings) -> str | None:
    """Return the cluster's token from the settings, else from Ray's defaults, else None.

    Raises:
        TargetError: The configured variable or file has no token.
    """
    title = f"compute target {settings.name!r}"
    if settings.token_env is not None:
        if value := os.environ.get(settings.token_env, "").strip():
            return value
        raise TargetError(f"{title}: the environment has no {settings.token_env}, which should hold its token. Set it.")
    if settings.token_file is not None:
        return _token_in(settings.token_file, title)
    if value := os.environ.get(_TOKEN_VARIABLE, "").strip():
        return value
    if path := os.environ.get(_TOKEN_PATH_VARIABLE):
        return _token_in(path, title)
    default = os.path.expanduser(_TOKEN_FILE)
    return _token_in(default, title) if os.path.exists(default) else None


def _token_in(path: str, title: str) -> str:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"{title}: its token can't be read from {path!r}: {error}. Put the token there.") from error
    # The token goes into an HTTP header, so it must be one word of ASCII.
    if not text or not text.isascii() or len(text.split()) != 1:
        raise TargetError(f"{title}: {path!r} holds no token: one word of ASCII. `ray get-auth-token` prints yours.")
    return text


def _address(name: str, address: str) -> str:
    if address == "auto":
        told = [os.environ.get(variable, "") for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
        address = next((value for value in told if value.startswith(("http://", "https://"))), _DEFAULT_ADDRESS)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise TargetError(
            f"compute target {name!r}: address={hidden(address)!r} is not a URL of a Ray dashboard. Give it as http://HOST:8265 "
            "(`ray start --head` prints it), not as ray://HOST:10001 or HOST:6379."
        )
    if parts.username or parts.password:
        raise TargetError(f"compute target {name!r}: the address has a password. Set token_file or headers instead.")
    return address.rstrip("/")


def _headers(name: str, lines: list[str]) -> dict[str, str]:
    headers = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise TargetError(f"compute target {name!r}: the header {line.partition(':')[0]!r} is not 'Name: text'.")
        if _SECRET.search(match[1]) and not match[2].startswith("env:"):
            raise TargetError(
                f"compute target {name!r}: the header {match[1]!r} would hold a secret in the clear. "
                f"Put it into a variable and give '{match[1]}: env:VARIABLE'."
            )
        headers[match[1]] = match[2]
    return headers


def _resources(name: str, words: list[str]) -> dict[str, float]:
    found = {}
    for word in words:
        resource, equals, amount = word.rpartition("=")
        try:
            value = float(amount) if equals and resource else -1.0
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise TargetError(
                f"compute target {name!r}: resources has {word!r}, which is not NAME=AMOUNT with an amount above 0."
            )
        if resource in ("CPU", "GPU"):
            setting = f"{resource.lower()}s_per_worker"
            raise TargetError(f"compute target {name!r}: resources has {word!r}; set {setting} instead.")
        found[resource] = value
    return found
