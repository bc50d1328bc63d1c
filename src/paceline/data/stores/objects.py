"""S3 through obstore, for listing and reading: several times as fast as s3fs, which remains for everything else.

Both are given the same endpoint and credentials. Where an option has no counterpart here, or obstore is not installed,
`object_store` is None, and s3fs lists and reads.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from paceline.data.stores.filesystem import Store

#: s3fs's options that obstore can be told; anything else leaves the store to s3fs.
_KNOWN = frozenset({"endpoint_url", "key", "secret", "token", "anon", "client_kwargs", "profile"})
_KNOWN_CLIENT = frozenset({"endpoint_url", "region_name"})
#: Set, one of these says that botocore's chain is needed to find the credentials: it knows roles, files and profiles.
_DIRECT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def object_store(store: Store) -> Any | None:
    """The obstore store of an S3 bucket, or None where s3fs has to do it. Paths in it are whole keys."""
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
        found = {"access_key_id": options.get("key", ""), "secret_access_key": options.get("secret", "")}
        provider = lambda: {**found, "token": options.get("token"), "expires_at": None}  # noqa: E731
    elif all(os.environ.get(name) for name in _DIRECT) and not _has_configuration(options):
        found = {"access_key_id": os.environ[_DIRECT[0]], "secret_access_key": os.environ[_DIRECT[1]]}
        token = os.environ.get("AWS_SESSION_TOKEN")
        provider = lambda: {**found, "token": token, "expires_at": None}  # noqa: E731
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    else:
        # obstore does not read botocore's files and profiles; so it is given what botocore finds, and both libraries work
        # as the same user.
        provider, chain_region, chain_endpoint = _botocore_chain(store, options.get("profile"))
        region, endpoint = region or chain_region, endpoint or chain_endpoint
    if endpoint is None and region is None:
        return None  # botocore finds a bucket's region; here it would be an error
    return _make(store.record.root.partition("/")[0], endpoint, region or "us-east-1", provider)


def _is_plain(options: dict[str, Any], client: dict[str, Any]) -> bool:
    given = (options.get("endpoint_url"), client.get("endpoint_url"), client.get("region_name"))
    return all(value is None or isinstance(value, str) for value in given)


def _has_configuration(options: dict[str, Any]) -> bool:
    """True if botocore would read a file, in which a region, an endpoint or a profile may stand."""
    if options.get("profile") or os.environ.get("AWS_PROFILE"):
        return True
    config = os.environ.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config")
    return os.path.exists(config)


def _botocore_chain(store: Store, profile: str | None) -> tuple[Callable[[], dict[str, Any]] | None, str, str | None]:
    """The choice of botocore, and so of s3fs: a provider of credentials, the region, an endpoint if one is configured.

    Raises:
        PacelineError: it finds no credentials.
    """
    with store.telling("finding its credentials"):
        import botocore.exceptions
        import botocore.session

        session = botocore.session.Session(profile=profile)
        credentials = session.get_credentials()
        if credentials is None:
            raise botocore.exceptions.NoCredentialsError()
        # Made for region and endpoint alone, which botocore takes from variables, files and profiles.
        client = session.create_client("s3", region_name=None)
        region, endpoint = client.meta.region_name, client.meta.endpoint_url

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        store.secrets.add("secret_access_key", frozen.secret_key)
        if frozen.token:
            store.secrets.add("token", frozen.token)
        # Credentials of a role expire; obstore asks again when they do. botocore keeps the time in a private name alone.
        expiry = getattr(credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expiry,
        }

    # Called once here, so that credentials that can't be read are an error before anything is fetched.
    provide()
    # Amazon's own is left to obstore, which makes it of the region.
    return provide, region, None if ".amazonaws.com" in endpoint else endpoint


def _make(bucket: str, endpoint: str | None, region: str, provider: Callable[[], dict[str, Any]] | None) -> Any:
    from obstore.store import S3Store

    # The bucket in the path: servers other than Amazon's are often reached by an address, in front of which no bucket's name
    # can stand.
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
            # A server of one's own may speak plain HTTP. Whether this one does, its endpoint says.
            "allow_http": True,
            "connect_timeout": "15s",
            "read_timeout": "60s",
            # This limits a whole request, and a large object on a slow line takes hours. A transfer that stalls is ended by
            # `read_timeout`.
            "timeout": "86400s",
        },
        # Our own code tries again, because it knows which part has come already.
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=20)},
    )
