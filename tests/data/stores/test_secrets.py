"""A planted secret is in nothing that is written or raised: every kind of failure, every file, every message."""

from __future__ import annotations

import io
import json
import logging
import pickle
import traceback
from urllib.parse import quote, quote_plus

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.data.transfer.upload import check_upload
from paceline.errors import PacelineError
from tests.data.servers import Answer
from tests.helpers import write_tree

SECRET = "pl4nted/Secret+with=signs & more"
FORMS = {SECRET, quote(SECRET), quote(SECRET, safe=""), quote_plus(SECRET), json.dumps(SECRET)[1:-1]}


@pytest.fixture
def logged():
    """All that is logged by anybody, at the lowest level."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


def seen_in(text: str) -> bool:
    return any(form in text for form in FORMS)


def everything(error: BaseException, workspace, cache, logged) -> str:
    """Return the message, the traceback with all causes, their reprs and pickles, the log, and all files."""
    parts = ["".join(traceback.format_exception(error)), logged.getvalue()]
    link: BaseException | None = error
    while link is not None:
        parts += [repr(link), str(link), repr(link.args)]
        link = link.__cause__ or link.__context__
    for top in (workspace.path, cache.folder):
        parts += [path.read_text(errors="replace") for path in top.rglob("*") if path.is_file()]
    return "\n".join(parts)


def echo(answer: Answer) -> None:
    """A server whose error repeats the request."""
    said = f"<Error><Code>AccessDenied</Code><Message>{SECRET} is wrong, {quote(SECRET)}</Message></Error>".encode()
    answer.status, answer.body, answer.headers = 403, said, {"Content-Length": str(len(said))}


@pytest.mark.promise("store-s-secret-file-log")
@pytest.mark.parametrize(
    ("url", "place"),
    [("proxy", "env"), ("proxy", "file"), ("http://127.0.0.1:9", "env"), ("http://no-such-host.invalid", "env")],
)
def test_s3_secret_does_not_appear_in_messages_logs_or_files(
    workspace, s3, bucket, proxied, take, cache, logged, monkeypatch, tmp_path, url, place
):
    s3.bucket(bucket, {"x": b"1"})
    monkeypatch.setenv("LAB_SECRET", SECRET)
    (tmp_path / "closed").write_text(SECRET)
    (tmp_path / "closed").chmod(0o600)
    url = proxied(s3.port, echo).url if url == "proxy" else url
    store = Datastore.register(
        workspace,
        "lab",
        f"s3://{bucket}",
        options={"endpoint_url": url},
        credentials={
            "key": "env:AWS_ACCESS_KEY_ID",
            "secret": "env:LAB_SECRET" if place == "env" else f"file:{tmp_path}/closed",
        },
    )
    for call in (
        lambda: take(store.path().as_download()),
        lambda: check_upload(store.path("out").as_upload(), workspace.path),
        lambda: store.download(tmp_path / "out", show_progress=False),
    ):
        with pytest.raises(PacelineError) as caught:
            call()
        assert not seen_in(everything(caught.value, workspace, cache, logged))
    assert not seen_in(repr(store) + repr(store.__dict__))
    assert SECRET.encode() not in pickle.dumps(store)


def test_aws_secret_from_the_environment_does_not_appear_in_messages(
    workspace, s3, bucket, proxied, take, cache, logged, monkeypatch
):
    s3.bucket(bucket, {"x": b"1"})
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = Datastore.register(workspace, "lab", f"s3://{bucket}", options={"endpoint_url": proxied(s3.port, echo).url})
    with pytest.raises(PacelineError) as caught:
        take(store.path().as_download())
    assert not seen_in(everything(caught.value, workspace, cache, logged))


@pytest.mark.parametrize("has_file", [True, False], ids=["in a file", "in variables"])
def test_aws_session_token_from_the_environment_does_not_appear_in_messages(
    workspace, s3_once, bucket, proxied, take, cache, logged, monkeypatch, tmp_path, has_file
):
    """Regression: of the credentials that botocore reads from its files, only the secret key was hidden in messages,
    not the session token."""
    s3_once.bucket(bucket, {"x": b"1"})
    if has_file:
        keys = f"aws_access_key_id = an-id\naws_secret_access_key = another-key\naws_session_token = {SECRET}\n"
        (tmp_path / "credentials").write_text(f"[default]\n{keys}")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    else:
        monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    url = proxied(s3_once.port, echo).url
    store = Datastore.register(workspace, "lab", f"s3://{bucket}", options={"endpoint_url": url})
    with pytest.raises(PacelineError) as caught:
        take(store.path().as_download())
    assert not seen_in(everything(caught.value, workspace, cache, logged))


def test_sftp_password_does_not_appear_in_messages_logs_or_files(
    workspace, sshd, take, cache, logged, monkeypatch, tmp_path
):
    monkeypatch.setenv("LAB_SECRET", SECRET)
    store = Datastore.register(
        workspace,
        "lab",
        sshd.url(tmp_path),
        options={"known_hosts": str(sshd.known_hosts)},
        credentials={"password": "env:LAB_SECRET"},
    )
    with pytest.raises(PacelineError, match="refuses these credentials") as caught:
        take(store.path().as_download())
    assert not seen_in(everything(caught.value, workspace, cache, logged))


def test_web_token_does_not_appear_in_logs_or_files_after_a_successful_download(
    workspace, take, cache, logged, monkeypatch, tmp_path
):
    from tests.data.servers import http_server

    monkeypatch.setenv("WEB_TOKEN", "planted-token")
    write_tree(tmp_path / "files", {"a": "1"})
    with http_server(tmp_path / "files", password="planted-token") as port:
        store = Datastore.register(workspace, "web", f"http://127.0.0.1:{port}", credentials={"token": "env:WEB_TOKEN"})
        fetched = take(store.path("a").as_download())
    assert fetched.path.read_text() == "1"
    assert "planted" not in everything(Exception(json.dumps(fetched.to_json())), workspace, cache, logged)
