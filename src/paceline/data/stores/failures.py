"""Translation of the exceptions of all store libraries to Paceline's errors.

This module imports no store library. It recognizes an error by its class name, HTTP status, errno and text.
"""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Callable, Iterator

from paceline.data.stores.credentials import Secrets
from paceline.data.stores.record import StoreRecord
from paceline.errors import DataError, EngineError, PacelineError, TransferError

#: Cause of a failure -> the advice that the error message gives to the user.
_NEXT_STEP = {
    "missing": "`paceline data ls` lists the files.",
    "no-store": "Correct the URL that the datastore was registered with.",
    "denied": "Check its credentials, and what they allow.",
    "forbidden": "Get this permission, or name another folder.",
    "no-host": "Check the host's name and the network, then try again.",
    "host-key": "Connect once with `ssh` and compare the key, so that it comes into ~/.ssh/known_hosts.",
    "changed": "Let whatever writes to it finish, then try again.",
    "disk": "Make room there, or put the cache elsewhere with PACELINE_DATA_CACHE.",
    "transient": "See that it is up and can be reached from here. Try again; what has come so far is kept.",
    "other": "Fix that and try again; data transferred so far is kept.",
}
_DENIED_CODES = frozenset(
    {
        *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "Forbidden"),
        *("AuthFailure", "AuthenticationFailed", "AuthorizationFailure", "NoCredentials", "TokenRefreshRequired"),
    }
)
_DENIED_CLASSES = frozenset(
    {
        *("PermissionDeniedError", "UnauthenticatedError", "AuthenticationException", "BadAuthenticationType"),
        *("NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "DefaultCredentialsError"),
        *("ProfileNotFound", "PasswordRequiredException", "RefreshError", "CredentialRetrievalError"),
        "PermissionError",
    }
)
_MISSING_CLASSES = frozenset({"FileNotFoundError", "NotFoundError", "ResourceNotFoundError"})
_MISSING_CODES = ("NoSuchKey", "BlobNotFound")
_TRANSIENT_CLASSES = frozenset(
    {
        *("ClientPayloadError", "ServerDisconnectedError", "ClientOSError", "ClientConnectorError", "ConnectionError"),
        *("ServerTimeoutError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "SSHException"),
        *("HTTPClientError", "ConnectionClosedError", "ResponseStreamingError", "IncompleteReadError", "ClosedSession"),
        *("FSTimeoutError", "ServiceRequestError", "ServiceResponseError", "EOFError", "TransferEncodingError"),
        *("NoValidConnectionsError", "ChannelException", "IncompleteRead", "ContentLengthError", "ShortError"),
        "TimeoutError",
    }
)
_TRANSIENT_ERRNOS = frozenset(
    {
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH),
        *(errno.ENETUNREACH, errno.EBUSY, errno.EAGAIN, errno.EINTR),
    }
)
_NAMELESS = frozenset({"GenericError", "BaseError"})
#: Matches the error text for a missing bucket or container. The error of gcsfs has only the path of the failed request.
_NO_STORE = re.compile(r"specified (?:bucket|container) does not exist|No such container|^(?:.*/)?b/[^/]+/o$")
_NO_HOST = re.compile("failed to lookup address|Name or service not known|nodename nor servname")
_BROKEN = re.compile("HTTP error|error sending|decod|body")
_STATUS = re.compile(r"status code:? (\d{3})|\bHTTP (\d{3})\b|^(\d{3})\b")
_CODE = re.compile(r"<Code>(\w+)</Code>|error occurred \((\w+)\)")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")


#: Cause of a failure -> explanation before the library's message. Without an entry here, only the library's message is shown.
_REASONS = {
    "missing": "there is nothing there",
    "no-store": "there is no such bucket or container",
    "changed": "it was changed while it was read, again and again",
    "denied": "the store refuses these credentials ({})",
    "no-host": "there is no such host ({})",
    "host-key": "the host is not known here, or shows another key than before ({})",
}


class StoreUnreachableError(EngineError, TransferError):
    """An error: a store did not answer or broke the connection."""


class ChangedError(Exception):
    """An error: a file has changed in its store since it was listed."""


class ShortError(Exception):
    """An error: the store sent fewer or more bytes than announced."""


def cause_of(error: BaseException) -> str:
    """Return the kind of a store library's error, such as "denied" or "disk".

    Other kinds: "forbidden" (file), "missing" (path), "no-store", "no-host", "host-key", "changed", "transient", "other".
    """
    causes = {_cause_of_one(link) for link in chain(error)}
    # The order matters: a full disk or a wrong key may also look like a lost connection, which would be retried in vain.
    order = ("disk", "changed", "host-key", "no-store", "forbidden", "denied", "no-host", "transient", "missing")
    return next((cause for cause in order if cause in causes), "other")


def translated(error: BaseException, record: StoreRecord, secrets: Secrets, what: str) -> PacelineError:
    """Return Paceline's error for a store library's error, without secrets.

    Args:
        error: The library's error. An error of Paceline is returned unchanged.
        record: The store that the error came from.
        secrets: The values to remove from the message.
        what: The failed action, such as "reading 'train/1.bin'".

    Returns:
        A `DataError` if the path does not exist, a `StoreUnreachableError` if the store did not answer, else a `TransferError`.
    """
    if isinstance(error, PacelineError):
        return error
    # Remove secrets from the whole chain of causes, because a traceback shows the whole chain.
    for link in chain(error):
        _scrub(link, secrets)
    cause = cause_of(error)
    reason = _REASONS.get(cause, "{}").format(secrets.scrub(_detail(error)))
    text = f"{what} in {secrets.scrub(record.title)} failed: {reason}. {_NEXT_STEP[cause]}"
    kinds = {"missing": DataError, "transient": StoreUnreachableError, "no-host": StoreUnreachableError}
    return kinds.get(cause, TransferError)(text)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its chain of causes and contexts."""
    # Stop at an error that was seen before: a `__context__` that was set by hand may form a cycle.
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


class _Evidence:
    def __init__(self, error: BaseException) -> None:
        self.names = {cls.__name__ for cls in type(error).__mro__}
        self.text = str(error)
        self.number = error.errno if isinstance(error, OSError) else None
        self.code = _code(error, self.text)
        self.status = _status(error, self.text) or 0


#: Causes and the tests that recognize them, the most certain first.
_RULES: tuple[tuple[str, Callable[[_Evidence], object]], ...] = (
    ("changed", lambda seen: seen.names & {"ChangedError", "PreconditionError", "FileExpired"}),
    ("disk", lambda seen: seen.number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    ("forbidden", lambda seen: seen.number in (errno.EACCES, errno.EPERM, errno.EROFS)),
    ("host-key", lambda seen: "BadHostKeyException" in seen.names or "not found in known_hosts" in seen.text),
    ("no-store", lambda seen: seen.code in ("NoSuchBucket", "ContainerNotFound") or _NO_STORE.search(seen.text)),
    ("no-host", lambda seen: seen.names & {"gaierror", "ClientConnectorDNSError"} or _NO_HOST.search(seen.text)),
    ("denied", lambda seen: seen.code in _DENIED_CODES or seen.status in (401, 403) or seen.names & _DENIED_CLASSES),
    ("denied", lambda seen: seen.text.startswith("Forbidden: ")),  # gcsfs raises an OSError without the status 403
    # Status 412: the condition If-Match has failed, because the object has changed since the listing.
    ("changed", lambda seen: seen.status == 412),
    ("missing", lambda seen: seen.status in (404, 410) or seen.names & _MISSING_CLASSES or seen.code in _MISSING_CODES),
    ("transient", lambda seen: seen.status >= 500 or seen.status in (408, 425, 429)),
    ("transient", lambda seen: seen.number in _TRANSIENT_ERRNOS or seen.names & _TRANSIENT_CLASSES),
    # obstore raises the classes in `_NAMELESS` for errors that have no class of their own, such as broken connections. An error
    # with an HTTP status came from a server that has answered, so the connection is not broken.
    ("transient", lambda seen: seen.names & _NAMELESS and not seen.status and _BROKEN.search(seen.text)),
)


def _cause_of_one(error: BaseException) -> str | None:
    seen = _Evidence(error)
    return next((cause for cause, tells in _RULES if tells(seen)), None)


def _status(error: BaseException, text: str) -> int | None:
    response: object = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    match = _STATUS.search(text)
    # Read the attributes lazily, because reading the property `code` of aiohttp's errors gives a warning.
    attributes = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    known = itertools.chain(
        attributes, [metadata.get("HTTPStatusCode")], map(int, filter(None, match.groups() if match else ()))
    )
    # Only numbers from 400 to 599 are the HTTP status of an error.
    return next((value for value in known if isinstance(value, int) and 400 <= value < 600), None)


def _code(error: BaseException, text: str) -> str | None:
    response: object = getattr(error, "response", None)
    if isinstance(response, dict) and response.get("Error", {}).get("Code"):
        return str(response["Error"]["Code"])
    match = _CODE.search(text)
    return next(filter(None, match.groups())) if match else None


def _detail(error: BaseException) -> str:
    links = list(chain(error))
    for link in links:
        if match := _MESSAGE.search(str(link)):
            code = _code(link, str(link))
            # Azure adds lines with the request's id and time.
            text = match[1].partition("\n")[0]
            return f"{code}: {text}" if code else text
    last = links[0]
    if isinstance(last, FileNotFoundError) and len(links) > 1:
        last = links[1]  # fsspec raises this error for every HTTP failure, so use its cause
    text = str(last).partition("\n")[0].strip().rstrip(".")
    if isinstance(last, OSError) and last.strerror and last.errno:
        text = f"{last.strerror}" + (f": {last.filename!r}" if last.filename else "")
    if cls := re.search(
        r"failed to lookup address[^\n\"]*|Connection refused|Connection reset|operation timed out", str(last)
    ):
        text = cls[0]
    return (text[:300] or type(last).__name__) if text else type(last).__name__


def _scrub(error: BaseException, secrets: Secrets) -> None:
    """Remove the secrets from a library's error, which a traceback shows."""
    try:
        error.args = tuple(secrets.scrub(part) if isinstance(part, str) else part for part in error.args)
        # Compare str and repr too: the text of an error may contain a secret that none of its arguments contains.
        if secrets.scrub(str(error)) != str(error) or secrets.scrub(repr(error)) != repr(error):
            error.args = ("(withheld: it may hold a secret)",)
    except Exception:
        # Ignore an error whose arguments are read-only, because Paceline's own message does not contain them.
        pass
