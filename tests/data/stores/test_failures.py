"""Foreign errors in our words: which cause, which message."""

from __future__ import annotations

import errno
import socket

import pytest

from paceline.data.stores.credentials import Secrets
from paceline.data.stores.failures import ChangedError, ShortError, cause_of, translated
from paceline.data.stores.record import StoreRecord
from paceline.errors import DataError, EngineError, TransferError

RECORD = StoreRecord(name="lab", url="s3://bucket")


class _AnswerError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"answer {status}")
        self.status = status


def named(name: str, text: str = "") -> Exception:
    """An error of a library that is not imported here."""
    error: Exception = type(name, (Exception,), {})(text)
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "full"), "disk"),
        (OSError(errno.EDQUOT, "full"), "disk"),
        (FileNotFoundError("x"), "missing"),
        (PermissionError("x"), "denied"),
        (PermissionError(errno.EACCES, "x"), "forbidden"),
        (OSError(errno.EROFS, "x"), "forbidden"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "transient"),
        (TimeoutError(), "transient"),
        (EOFError(), "transient"),
        (ShortError("x"), "transient"),
        (ChangedError("x"), "changed"),
        (socket.gaierror(-2, "Name or service not known"), "no-host"),
        (_AnswerError(401), "denied"),
        (_AnswerError(404), "missing"),
        (_AnswerError(412), "changed"),
        (_AnswerError(503), "transient"),
        (_AnswerError(429), "transient"),
        (_AnswerError(400), "other"),
        (named("AuthenticationException"), "denied"),
        (named("BadHostKeyException"), "host-key"),
        (
            named("GenericError", "Server returned non-2xx status code: 404 Not Found: <Code>NoSuchBucket</Code>"),
            "no-store",
        ),
        (named("GenericError", "Server returned non-2xx status code: 500 x"), "transient"),
        (named("GenericError", "HTTP error: error sending request"), "transient"),
        (ValueError("x"), "other"),
    ],
    ids=repr,
)
def test_error_of_a_storage_library_is_mapped_to_its_failure_cause(error, cause):
    assert cause_of(error) == cause


def test_cause_of_a_storage_error_is_that_of_the_wrapped_exception():
    error = FileNotFoundError("url")
    error.__cause__ = _AnswerError(403)
    assert cause_of(error) == "denied"


def test_storage_error_names_store_file_reason_and_next_step():
    told = translated(FileNotFoundError("x"), RECORD, Secrets(), "reading 'x'")
    assert isinstance(told, DataError)
    assert str(told) == (
        "reading 'x' in datastore 'lab' (s3://bucket) failed: there is nothing there. "
        "`paceline data ls` lists the files."
    )
    assert isinstance(translated(ValueError("x"), RECORD, Secrets(), "reading"), TransferError)


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), True),
        (socket.gaierror(-2, "Name or service not known"), True),
        (_AnswerError(503), True),
        (_AnswerError(403), False),
        (FileNotFoundError("x"), False),
        (OSError(errno.ENOSPC, "full"), False),
    ],
    ids=["refused", "no-host", "503", "denied", "missing", "full"],
)
def test_unreachable_datastore_raises_engine_error_but_denied_access_or_a_missing_file_does_not(error, is_away):
    told = translated(error, RECORD, Secrets(), "reading 'x'")
    assert isinstance(told, EngineError) is is_away
    # EngineError must also be a TransferError, so that users who catch TransferError catch it too.
    assert isinstance(told, TransferError) or not is_away
    assert str(told).startswith("reading 'x' in datastore 'lab' (s3://bucket) failed: ")
    assert not is_away or "try again" in str(told).lower()


def test_translating_a_storage_error_returns_a_paceline_error_unchanged():
    error = DataError("as it is")
    assert translated(error, RECORD, Secrets(), "reading") is error


def test_secrets_are_removed_from_a_translated_storage_error_and_its_cause():
    error = ValueError("refused: planted", {"also": "planted"})
    told = translated(error, RECORD, Secrets({"key": "planted"}), "reading")
    assert "planted" not in str(told) + repr(error) + str(error)
