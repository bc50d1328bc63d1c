"""S3: listing and reading through obstore, and resumable multipart uploads through s3fs.

obstore lists and reads several times as fast as s3fs. Both libraries get the same endpoint and credentials. If obstore is not
installed, or lacks an option of the store, `object_store` returns None and Paceline uses s3fs.

S3 keeps the parts of an unfinished upload, and the next upload to the same key reuses each part whose size and ETag
match the file. An ETag is the part's MD5, unless the store encrypts the object with its own keys:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.data.stores.filesystem import Store

#: s3fs options with a counterpart in obstore.
_KNOWN = frozenset({"endpoint_url", "key", "secret", "token", "anon", "client_kwargs", "profile"})
_KNOWN_CLIENT = frozenset({"endpoint_url", "region_name"})
#: Variables with credentials. If they are not set, botocore searches roles, configuration files and profiles.
_DIRECT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

#: Minimum size in bytes of a part of an upload. An interruption loses at most the `_AT_ONCE` parts in transfer.
PART_BYTES = 16 << 20
_MOST_PARTS = 9000
_AT_ONCE = 4


def object_store(store: Store) -> Any | None:
    """Return obstore's client for the bucket, or None if s3fs must be used."""
    if store.kind != "s3" or importlib.util.find_spec("obstore") is None:
        return None
    options: dict[str, Any] = {**store.record.options, **store.secrets.options()}
    client = options.get("client_kwargs") or {}
    if set(options) - _KNOWN or set(client) - _KNOWN_CLIENT or not _is_plain(options, client):
        return None
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    region = client.get("region_name") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    provider: Callable[[], dict[str, Any]] | None = None
    if options.get("anon"):
        pass
    elif options.get("key") or options.get("secret"):
        credentials = {"access_key_id": options.get("key", ""), "secret_access_key": options.get("secret", "")}
        provider = lambda: {**credentials, "token": options.get("token"), "expires_at": None}  # noqa: E731
    elif all(os.environ.get(name) for name in _DIRECT) and not _has_configuration(options):
        credentials = {"access_key_id": os.environ[_DIRECT[0]], "secret_access_key": os.environ[_DIRECT[1]]}
        token = os.environ.get("AWS_SESSION_TOKEN")
        provider = lambda: {**credentials, "token": token, "expires_at": None}  # noqa: E731
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    else:
        # obstore does not read botocore's files and profiles. Use botocore's credentials, so that both libraries act as the
        # same user.
        provider, chain_region, chain_endpoint = _botocore_chain(store, options.get("profile"))
        region, endpoint = region or chain_region, endpoint or chain_endpoint
    if endpoint is None and region is None:
        return None  # obstore needs the region, which s3fs finds by itself: use s3fs
    return _make(store.record.root.partition("/")[0], endpoint, region or "us-east-1", provider)


def _is_plain(options: dict[str, object], client: dict[str, object]) -> bool:
    settings = (options.get("endpoint_url"), client.get("endpoint_url"), client.get("region_name"))
    return all(value is None or isinstance(value, str) for value in settings)


def _has_configuration(options: dict[str, object]) -> bool:
    """Return whether botocore would read a profile or configuration file."""
    if options.get("profile") or os.environ.get("AWS_PROFILE"):
        return True
    return os.path.exists(os.environ.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config"))


def _botocore_chain(
    store: Store, profile: str | None
) -> tuple[Callable[[], dict[str, object]] | None, str, str | None]:
    """Return the credential provider, region and endpoint that botocore finds.

    Raises:
        PacelineError: botocore finds no credentials.
    """
    with store.translating("finding its credentials"):
        import botocore.exceptions
        import botocore.session

        session = botocore.session.Session(profile=profile)
        credentials = session.get_credentials()
        if credentials is None:
            raise botocore.exceptions.NoCredentialsError()
        # Create a client only to resolve region and endpoint from variables, files and profiles.
        client = session.create_client("s3", region_name=None)
        region, endpoint = client.meta.region_name, client.meta.endpoint_url

    def provide() -> dict[str, object]:
        frozen = credentials.get_frozen_credentials()
        store.secrets.add("secret_access_key", frozen.secret_key)
        if frozen.token:
            store.secrets.add("token", frozen.token)
        # When a role's credentials expire, obstore calls `provide` again. Only this private attribute has the time of expiry.
        expiry = getattr(credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expiry,
        }

    # Call `provide` once now, so that unreadable credentials raise an error before any transfer.
    provide()
    # Don't pass an endpoint of Amazon, because obstore derives it from the region.
    return provide, region, None if ".amazonaws.com" in endpoint else endpoint


def _make(bucket: str, endpoint: str | None, region: str, provider: Callable[[], dict[str, object]] | None) -> Any:
    from obstore.store import S3Store

    # Use path-style URLs: servers other than Amazon's often have an IP address, which can't have a bucket as subdomain.
    values: dict[str, Any] = {"region": region, "virtual_hosted_style_request": False}
    if endpoint is not None:
        values["endpoint"] = endpoint
    if provider is None:
        values["skip_signature"] = True
    else:
        values["credential_provider"] = provider
    return S3Store(
        bucket,
        **values,
        client_options={
            # Allow HTTP, which a private server may use. The scheme of the endpoint decides between HTTP and HTTPS.
            "allow_http": True,
            "connect_timeout": "15s",
            "read_timeout": "60s",
            # Allow a day for a request: a large object on a slow line takes hours. `read_timeout` ends a stalled transfer.
            "timeout": "86400s",
        },
        # Let obstore retry only once: Paceline's own code retries, because it knows which bytes have arrived.
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=20)},
    )


def is_multipart(size: int) -> bool:
    """Return whether a file is large enough for a multipart upload."""
    return size > 2 * PART_BYTES


def put_multipart(fs: Any, file: Path, full: str, stop: threading.Event) -> None:
    """Upload a file in parts, reusing the parts of an interrupted upload.

    Args:
        fs: An s3fs file system.
        file: The local file.
        full: Bucket and key.
        stop: When this event is set, no further part is uploaded.

    Raises:
        Exception: Any error of botocore. Uploaded parts stay in the store for the next attempt.
    """
    bucket, key, _ = fs.split_path(full)
    size = os.stat(file).st_size
    length = max(PART_BYTES, -(-size // _MOST_PARTS >> 20) + 1 << 20)
    to = {"Bucket": bucket, "Key": key}
    upload, there = _found(fs, to)
    if upload is None:
        upload = fs.call_s3("create_multipart_upload", **to)["UploadId"]
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def part(number: int) -> dict[str, object]:
        if stop.is_set():
            raise InterruptedError("the upload was given up")
        data = os.pread(fd, length, (number - 1) * length)
        etag, held = there.get(number, ("", -1))
        if held != len(data) or etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
            etag = fs.call_s3("upload_part", **to, UploadId=upload, PartNumber=number, Body=data)["ETag"]
        return {"PartNumber": number, "ETag": etag}

    try:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="paceline-store-part") as pool:
            waiting = [pool.submit(part, number) for number in range(1, -(-size // length) + 1)]
            try:
                parts = [each.result() for each in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        fs.call_s3("complete_multipart_upload", **to, UploadId=upload, MultipartUpload={"Parts": parts})
    except Exception:
        # Ignore the error if a concurrent upload of the same content has completed the object.
        if not _is_there(fs, to, size):
            raise
    finally:
        os.close(fd)
        fs.invalidate_cache(full)


def _found(fs: Any, to: dict[str, str]) -> tuple[str | None, dict[int, tuple[str, int]]]:
    """Return a key's latest unfinished upload: its id, and parts as number -> (ETag, size).

    `to` is the key: {"Bucket": ..., "Key": ...}. Return (None, {}) without an upload, or if the store can't list uploads.
    """
    try:
        answer = fs.call_s3("list_multipart_uploads", Bucket=to["Bucket"], Prefix=to["Key"])
        begun = [each for each in answer.get("Uploads", ()) if each["Key"] == to["Key"]]
        if not begun:
            return None, {}
        upload = max(begun, key=lambda each: each["Initiated"])["UploadId"]
        parts: dict[int, tuple[str, int]] = {}
        marker = 0
        while True:
            answer = fs.call_s3("list_parts", **to, UploadId=upload, PartNumberMarker=marker)
            parts |= {each["PartNumber"]: (each["ETag"], each["Size"]) for each in answer.get("Parts", ())}
            if not answer.get("IsTruncated"):
                return upload, parts
            marker = int(answer["NextPartNumberMarker"])
    except Exception:  # the store can't list upload parts, or another process has completed the upload
        return None, {}


def _is_there(fs: Any, to: dict[str, str], size: int) -> bool:
    try:
        return bool(fs.call_s3("head_object", **to)["ContentLength"] == size)
    except Exception:  # no such object, or no answer: the caller raises the error of the upload
        return False
