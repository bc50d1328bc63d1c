"""Faults of transfers from an S3 server: each is repaired, or causes one clear error; no partial file counts as whole."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.data.transfer import transfer as module
from paceline.data.transfer.partial import SINGLE_BYTES
from paceline.data.transfer.upload import check_upload
from paceline.errors import DataError, EngineError, PacelineError, TransferError
from tests.data.conftest import s3_store
from tests.data.servers import ACCOUNT_KEY, S3, Answer, port_of
from tests.helpers import write_tree

BODY = bytes(range(256)) * 2000


def spoil(path: str, change: Callable[[Answer], None], times: int = 10**9) -> Callable[[Answer], None]:
    """Changes the first answers to GETs of objects with this ending."""
    left = [times]

    def call(answer: Answer) -> None:
        if (
            answer.method == "GET"
            and answer.path.partition("?")[0].endswith(path)
            and answer.status < 300
            and left[0] > 0
        ):
            left[0] -= 1
            change(answer)

    return call


def cut(after: int) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        answer.cut_after = after

    return change


def nothing_is_kept(cache) -> bool:
    return cache.use().files == 0 and not list(cache.views.glob("run_1/0/*"))


@pytest.mark.promise("only-whole-files-taken-breaks")
def test_interrupted_download_resumes_at_its_last_byte(workspace, objects, bucket, proxied, take):
    objects.bucket(bucket, {"x.bin": BODY * 5})
    proxy = proxied(objects.port, spoil("x.bin", cut(1_000_000), times=1))
    fetched = take(s3_store(workspace, proxy.url, bucket).path().as_download())
    assert (fetched.path / "x.bin").read_bytes() == BODY * 5
    assert fetched.fetched_bytes == len(BODY) * 5, "no byte came twice"
    assert any(ranges.startswith("bytes=") and ranges != "bytes=0-" for ranges in proxy.gets("x.bin"))


def test_truncated_small_object_is_fetched_again(workspace, objects, bucket, proxied, take):
    objects.bucket(bucket, {"x.bin": BODY})
    proxy = proxied(objects.port, spoil("x.bin", cut(1000), times=2))
    fetched = take(s3_store(workspace, proxy.url, bucket).path().as_download())
    assert (fetched.path / "x.bin").read_bytes() == BODY


def test_permanently_broken_connection_raises_and_leaves_no_partial_file(
    workspace, objects, bucket, proxied, take, cache
):
    objects.bucket(bucket, {"x.bin": BODY})
    proxy = proxied(objects.port, spoil("x.bin", cut(0)))
    with pytest.raises(EngineError, match=r"reading 'x.bin' in datastore 'lab' .* failed: .*Try again"):
        take(s3_store(workspace, proxy.url, bucket).path().as_download())
    assert nothing_is_kept(cache)
    assert len(proxy.gets("x.bin")) < 60, "trying again ends"


@pytest.mark.promise("only-whole-files-taken-breaks")
def test_object_shorter_than_listed_is_refused(workspace, objects, bucket, proxied, take, cache):
    def shorten(answer: Answer) -> None:
        answer.body = answer.body[:100]
        answer.headers["Content-Length"] = "100"

    objects.bucket(bucket, {"x.bin": BODY})
    proxy = proxied(objects.port, spoil("x.bin", shorten))
    with pytest.raises(TransferError, match=r"x\.bin"):
        take(s3_store(workspace, proxy.url, bucket).path().as_download())
    assert nothing_is_kept(cache)


@pytest.mark.promise("file-changes-after-listing-error")
def test_object_changed_after_listing_is_refused_and_fetched_next_time(
    workspace, objects, bucket, proxied, take, cache
):
    objects.bucket(bucket, {"x.bin": BODY})
    new = BODY[::-1]

    def change(answer: Answer) -> None:
        if answer.is_listing:
            objects.put(bucket, "x.bin", new)

    proxy = proxied(objects.port, change)
    store = s3_store(workspace, proxy.url, bucket)
    with pytest.raises(TransferError, match=r"it was changed while it was read"):
        take(store.path().as_download())
    assert nothing_is_kept(cache)
    proxy.spoil = lambda answer: None
    assert (take(store.path().as_download()).path / "x.bin").read_bytes() == new


def test_partial_file_of_an_old_version_is_discarded(workspace, objects, bucket, proxied, take, cache):
    objects.bucket(bucket, {"x.bin": BODY * 12})

    def keep_the_front(answer: Answer) -> None:
        ranges = answer.request_headers.get("range")
        if ranges is None or not ranges.startswith("bytes=0-"):
            answer.cut_after = 10**6 if ranges is None else 0

    proxy = proxied(objects.port, spoil("x.bin", keep_the_front))
    store = s3_store(workspace, proxy.url, bucket)
    with pytest.raises(TransferError):
        take(store.path().as_download())
    proxy.spoil = lambda answer: None
    assert any(part.stat().st_size for part in (cache.folder / "partial").iterdir()), "something had come"
    objects.put(bucket, "x.bin", BODY[::-1] * 12)
    assert (take(store.path().as_download()).path / "x.bin").read_bytes() == BODY[::-1] * 12


def test_resumed_download_of_a_large_file_fetches_only_its_missing_byte_ranges(
    workspace, objects, bucket, proxied, take, monkeypatch
):
    monkeypatch.setattr("paceline.data.transfer.partial.SINGLE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "SINGLE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_RANGE_BYTES", 1 << 20)
    body = os.urandom(5_000_000)
    objects.bucket(bucket, {"large.bin": body})

    def break_third(answer: Answer) -> None:
        if answer.request_headers.get("range", "").startswith(f"bytes={2 << 20}-"):
            answer.status, answer.body, answer.headers["Content-Length"] = 500, b"", "0"

    proxy = proxied(objects.port, spoil("large.bin", break_third))
    store = s3_store(workspace, proxy.url, bucket)
    with pytest.raises(TransferError, match=r"large\.bin"):
        take(store.path().as_download())
    proxy.spoil = lambda answer: None
    fetched = take(store.path().as_download())
    assert (fetched.path / "large.bin").read_bytes() == body
    assert 0 < fetched.fetched_bytes < len(body), "what had come was kept"


def test_server_killed_during_download_raises_and_the_next_run_resumes(
    workspace, s3_once, bucket, proxied, take, cache
):
    size = SINGLE_BYTES + (20 << 20)
    body = os.urandom(1 << 20) * (size >> 20)
    server = S3()

    def kill(answer: Answer) -> None:
        """After the first 10 MiB of a range: however fast the rest comes, this one is missing."""
        if answer.path.endswith("x.bin") and len(answer.body) > 10 << 20 and server.process.poll() is None:
            server.kill()
            answer.cut_after = 10 << 20

    try:
        server.bucket(bucket, {"x.bin": body})
        proxy = proxied(port_of(server.url), kill)
        store = s3_store(workspace, proxy.url, bucket)
        with pytest.raises(TransferError, match=r"x\.bin"):
            take(store.path().as_download())
        assert server.process.poll() is not None, "it was killed before the end"
        assert nothing_is_kept(cache)
    finally:
        server.kill()
    # The store serves the same object again.
    s3_once.bucket(bucket, {"x.bin": body})
    proxy.upstream, proxy.spoil = s3_once.port, lambda answer: None
    told: list[int] = []
    fetched = take(store.path().as_download(), progress=lambda done, *_: told.append(done))
    assert (fetched.path / "x.bin").read_bytes() == body
    assert fetched.fetched_bytes < len(body), "what had come was kept"
    assert told[-1] == len(body), "and counted"


def test_download_is_retried_after_http_status_500(workspace, objects, bucket, proxied, take):
    def fail(answer: Answer) -> None:
        answer.status, answer.body, answer.headers["Content-Length"] = 503, b"", "0"

    objects.bucket(bucket, {"x.bin": BODY})
    proxy = proxied(objects.port, spoil("x.bin", fail, times=2))
    assert (take(s3_store(workspace, proxy.url, bucket).path().as_download()).path / "x.bin").read_bytes() == BODY


def test_object_deleted_after_listing_raises(workspace, objects, bucket, proxied, take, cache):
    objects.bucket(bucket, {"x.bin": BODY, "y.bin": BODY})

    def remove(answer: Answer) -> None:
        if answer.is_listing:
            objects.remove(bucket, "y.bin")

    proxy = proxied(objects.port, remove)
    with pytest.raises(DataError, match=r"reading 'y.bin' in datastore 'lab' .* there is nothing there"):
        take(s3_store(workspace, proxy.url, bucket).path().as_download())
    assert not (cache.views / "run_1/0/lab").exists()


def test_wrong_s3_keys_raise_an_error_without_the_secret(workspace, s3, bucket, take, monkeypatch):
    s3.bucket(bucket, {"x.bin": BODY})
    monkeypatch.setenv("LAB_SECRET", "a wrong/secret+key")
    store = s3_store(workspace, s3.url, bucket)
    store = type(store).register(
        workspace, "lab", store.url, options={"endpoint_url": s3.url},
        credentials={"key": "env:AWS_ACCESS_KEY_ID", "secret": "env:LAB_SECRET"}, overwrite=True,
    )  # fmt: skip
    s3.check_keys(True)
    try:
        with pytest.raises(
            TransferError, match=r"the store refuses these credentials .*Check its credentials"
        ) as caught:
            take(store.path().as_download())
    finally:
        s3.check_keys(False)
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(("objects", "status"), [*[("gcs", 401), ("gcs", 403)], ("azure", 403)], indirect=["objects"])
@pytest.mark.proof
def test_wrong_keys_of_gcs_and_azure_raise_one_short_error(workspace, objects, bucket, proxied, monkeypatch, status):
    """fake-gcs-server takes all keys, so a proxy refuses them as Google does."""
    objects.bucket(bucket)

    def refuse(answer: Answer) -> None:
        if objects.kind == "gcs":
            answer.status = status
            answer.body = b'{"error": {"code": %d, "message": "Anonymous caller lacks access."}}' % status
            answer.headers["Content-Length"] = str(len(answer.body))

    store = s3_store(workspace, proxied(objects.port, refuse).url, f"{bucket}/x")
    wrong = ACCOUNT_KEY.swapcase()
    monkeypatch.setenv("AZURE_TEST", os.environ["AZURE_TEST"].replace(ACCOUNT_KEY, wrong))
    for act in (store.files, lambda: check_upload(store.path("x").as_upload(overwrite=True), workspace.path)):
        with pytest.raises(
            TransferError, match=r"the store refuses these credentials .*Check its credentials"
        ) as caught:
            act()
        assert wrong not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_fetch_from_a_missing_bucket_raises(workspace, objects, take):
    with pytest.raises(TransferError, match=r"listing '' in datastore 'lab' .* there is no such bucket"):
        take(s3_store(workspace, objects.url, "no-such-bucket").path().as_download())


@pytest.mark.parametrize("url", ["http://no-such-host.invalid", "http://127.0.0.1:9"])
def test_fetch_from_an_unreachable_host_raises(workspace, s3, take, url):
    with pytest.raises(TransferError, match="listing '' in datastore 'lab'"):
        take(s3_store(workspace, url, "bucket").path().as_download())


def test_download_to_a_full_cache_disk_raises_an_error_that_names_the_cache_variable(
    workspace, objects, bucket, take, small_disk
):
    from paceline.data.transfer.cache import DataCache

    objects.bucket(bucket, {"x.bin": BODY * 4, "y.bin": BODY * 4})
    full = DataCache(small_disk / "cache", limit_bytes=10**9)
    with pytest.raises(TransferError, match=r"no room .*PACELINE_DATA_CACHE"):
        take(
            s3_store(workspace, objects.url, bucket).path().as_download(),
            cache=full,
            view_dir=full.view_dir("run_1", 0),
        )
    assert full.use().files < 2
    for folder in full.views.glob("run_1/0/*"):
        raise AssertionError(f"{folder} was left")


def test_last_progress_report_of_a_fetch_has_all_bytes_and_files(workspace, objects, bucket, take):
    objects.bucket(bucket, {f"{number}.bin": BODY for number in range(5)})
    told: list[tuple[int, int, int, int]] = []
    take(s3_store(workspace, objects.url, bucket).path().as_download(), progress=lambda *figures: told.append(figures))
    assert told[-1] == (5 * len(BODY), 5 * len(BODY), 5, 5)


def test_fetch_raises_and_leaves_no_input_folder_if_one_file_cannot_be_downloaded(
    workspace, objects, bucket, proxied, take, cache
):
    objects.bucket(bucket, {f"{number}.bin": BODY for number in range(40)})
    proxy = proxied(objects.port, spoil("/7.bin", cut(0)))
    with pytest.raises(PacelineError, match=r"7\.bin"):
        take(s3_store(workspace, proxy.url, bucket).path().as_download())
    assert not list(cache.views.glob("run_1/0/*"))


def test_small_files_share_one_sftp_connection(workspace, sshd, tmp_path):
    """Regression: the SFTP library hands each response to any thread that reads. If several threads had sent requests,
    some waited forever."""
    names = write_tree(tmp_path / "far", {f"{number}": str(number) for number in range(40)})
    store = Datastore.register(workspace, "lab", sshd.url(names), options=sshd.options())
    assert store.download(tmp_path / "here", show_progress=False) == 40
    assert {path.name: path.read_text() for path in (tmp_path / "here").iterdir()} == {
        f"{number}": str(number) for number in range(40)
    }
