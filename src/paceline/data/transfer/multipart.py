"""Resumable multipart uploads to S3, for objects named after their content.

S3 keeps the parts of an unfinished upload. An upload under a content-addressed name has the same bytes, no matter which process
began it. Still, a part is reused only if its size and ETag match the file. An ETag is an MD5 unless the store encrypts with its
own keys.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: Least size of a part. An interruption loses at most `_AT_ONCE` parts.
PART_BYTES = 16 << 20
_MOST_PARTS = 9000
_AT_ONCE = 4


def is_large(size: int) -> bool:
    """Return True for a file worth several parts."""
    return size > 2 * PART_BYTES


def put(fs: Any, file: Path, full: str, stop: threading.Event) -> None:
    """Upload a file under a content-addressed name, reusing the parts that are stored.

    Args:
        fs: An s3fs file system.
        file: The local file.
        full: Bucket and key.
        stop: Once set, no further part is started.

    Raises:
        Exception: Any error of botocore. Stored parts stay for the next attempt.
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
        # A concurrent upload of the same content may have completed it.
        if not _is_there(fs, to, size):
            raise
    finally:
        os.close(fd)
        fs.invalidate_cache(full)


def _found(fs: Any, to: dict[str, str]) -> tuple[str | None, dict[int, tuple[str, int]]]:
    """Return (latest upload of this key, its parts), or (None, {}).

    The parts map a number to (ETag, bytes).
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
    except Exception:  # not allowed to list, a store that can't, or finished by somebody else meanwhile
        return None, {}


def _is_there(fs: Any, to: dict[str, str], size: int) -> bool:
    try:
        return bool(fs.call_s3("head_object", **to)["ContentLength"] == size)
    except Exception:  # missing or no answer: the earlier error is raised
        return False
