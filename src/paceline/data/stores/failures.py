"""Translation of the exceptions of all store libraries, which only this module knows.

It imports none of them: the class name, status, errno and text identify an error.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from paceline.data.stores.credentials import Secrets
from paceline.data.stores.record import StoreRecord
from paceline.errors import DataError, EngineError, PacelineError, TransferError

#: The next step for each cause.
_NEXT_STEP = {
    "missing": "Look with `paceline data ls` what is there.",
    "no-store": "Correct the URL that the datastore was registered with.",
    "denied": "Check its credentials, and what they allow.",
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
    }
)
_MISSING_CLASSES = frozenset({"FileNotFoundError", "NotFoundError", "ResourceNotFoundError"})
_TRANSIENT_CLASSES = frozenset(
    {
        *("ClientPayloadError", "ServerDisconnectedError", "ClientOSError", "ClientConnectorError", "ConnectionError"),
        *("ServerTimeoutError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "SSHException"),
        *("HTTPClientError", "ConnectionClosedError", "ResponseStreamingError", "IncompleteReadError", "ClosedSession"),
        *("FSTimeoutError", "ServiceRequestError", "ServiceResponseError", "EOFError", "TransferEncodingError"),
        *("NoValidConnectionsError", "ChannelException", "IncompleteRead", "ContentLengthError", "ShortError"),
    }
)
_TRANSIENT_ERRNOS = frozenset(
    {
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH),
        *(errno.ENETUNREACH, errno.EBUSY, errno.EAGAIN, errno.EINTR),
    }
)
_STATUS = re.compile(r"status code:? (\d{3})|\bHTTP (\d{3})\b|^(\d{3})\b")
_CODE = re.compile(r"<Code>(\w+)</Code>|error occurred \((\w+)\)")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")


class StoreUnreachableError(EngineError, TransferError):
    """A store did not answer or broke the connection: host down, network down, or too busy."""


class ChangedError(Exception):
    """The object has changed since the listing. Handled within this package."""


class ShortError(Exception):
    """The store sent fewer or more bytes than it had announced."""


def cause_of(error: BaseException) -> str:
    """Return the cause of a failure.

    It is one of: missing, no-store, denied, no-host, host-key, changed, disk, transient, other. A "transient" failure may
    succeed on a retry.
    """
    found = [_cause_of_one(link) for link in chain(error)]
    # The order matters: a full disk or a wrong key may also look like a lost connection, which would be retried in vain.
    for cause in ("disk", "changed", "host-key", "no-store", "denied", "no-host", "transient", "missing"):
        if cause in found:
            return cause
    return "other"


def translated(error: BaseException, record: StoreRecord, secrets: Secrets, what: str) -> PacelineError:
    """Translate an error of a store library, and remove every secret from both errors.

    Args:
        error: The library's error. An error of Paceline is returned unchanged.
        record: The store.
        secrets: Values to remove.
        what: The failed action, such as "reading 'train/1.bin'".

    Returns:
        A `DataError` if the path does not exist, a `StoreUnreachableError` if the store did not answer, else a `TransferError`.
    """
    if isinstance(error, PacelineError):
        return error
    # A traceback shows the whole chain.
    for link in chain(error):
        _scrub(link, secrets)
    cause = cause_of(error)
    reason = {
        "missing": "there is nothing there",
        "no-store": "there is no such bucket or container",
        "changed": "it was changed while it was read, again and again",
    }.get(cause)
    detail = secrets.scrub(_detail(error))
    if cause == "denied":
        reason = f"the store refuses these credentials ({detail})"
    elif cause == "no-host":
        reason = f"there is no such host ({detail})"
    elif cause == "host-key":
        reason = f"the host is not known here, or shows another key than before ({detail})"
    text = f"{what} in {secrets.scrub(record.title)} failed: {reason or detail}. {_NEXT_STEP[cause]}"
    kinds = {"missing": DataError, "transient": StoreUnreachableError, "no-host": StoreUnreachableError}
    return kinds.get(cause, TransferError)(text)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    # A context that was set by hand may form a cycle.
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _cause_of_one(error: BaseException) -> str | None:
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if isinstance(error, ChangedError) or "PreconditionError" in names or "FileExpired" in names:
        return "changed"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "disk"
    if "BadHostKeyException" in names or "not found in known_hosts" in text:
        return "host-key"
    code = _code(error, text)
    if code in ("NoSuchBucket", "ContainerNotFound") or "specified bucket does not exist" in text:
        return "no-store"
    if "gaierror" in names or "failed to lookup address" in text or "ClientConnectorDNSError" in names:
        return "no-host"
    if "Name or service not known" in text or "nodename nor servname" in text:
        return "no-host"
    status = _status(error, text)
    if code in _DENIED_CODES or status in (401, 403) or names & _DENIED_CLASSES or isinstance(error, PermissionError):
        return "denied"
    if status == 412:
        # If-Match failed: the object has changed since the listing.
        return "changed"
    if status in (404, 410) or names & _MISSING_CLASSES or code in ("NoSuchKey", "BlobNotFound"):
        return "missing"
    if status is not None and (status >= 500 or status in (408, 425, 429)):
        return "transient"
    if number in _TRANSIENT_ERRNOS or isinstance(error, TimeoutError) or names & _TRANSIENT_CLASSES:
        return "transient"
    # obstore raises these for errors without a class of their own. A status means that the server has answered, with another
    # error.
    if (
        names & {"GenericError", "BaseError"}
        and status is None
        and re.search(r"HTTP error|error sending|decod|body", text)
    ):
        return "transient"
    return None


def _status(error: BaseException, text: str) -> int | None:
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        # Numbers outside this range are not an HTTP status.
        if isinstance(value, int) and 400 <= value < 600:
            return value
    response: object = getattr(error, "response", None)
    if isinstance(response, dict):
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(value, int):
            return value
    match = _STATUS.search(text)
    value = int(next(filter(None, match.groups()))) if match else None
    return value if value is not None and 400 <= value < 600 else None


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
            return f"{code}: {match[1]}" if code else match[1]
    last = links[0]
    if isinstance(last, FileNotFoundError) and len(links) > 1:
        last = links[1]  # fsspec's HTTP says this of every failure; why comes behind it
    text = str(last).partition("\n")[0].strip().rstrip(".")
    if isinstance(last, OSError) and last.strerror and last.errno:
        text = f"{last.strerror}" + (f": {last.filename!r}" if last.filename else "")
    if cls := re.search(
        r"failed to lookup address[^\n\"]*|Connection refused|Connection reset|operation timed out", str(last)
    ):
        text = cls[0]
    return (text[:300] or type(last).__name__) if text else type(last).__name__


def _scrub(error: BaseException, secrets: Secrets) -> None:
    """Remove the secrets from the foreign error as well: tracebacks and loggers show it."""
    try:
        error.args = tuple(secrets.scrub(part) if isinstance(part, str) else part for part in error.args)
        # The class may render more than the arguments.
        if secrets.scrub(str(error)) != str(error) or secrets.scrub(repr(error)) != repr(error):
            error.args = ("(withheld: it may hold a secret)",)
    except Exception:
        # A class with read-only arguments stays unchanged; our own message does not depend on it.
        pass
