"""Servers for versions that are pushed to stores."""

from tests.data.conftest import _azure, _gcs, _s3, bucket, proxied, s3_once, sshd

__all__ = ["_azure", "_gcs", "_s3", "bucket", "proxied", "s3_once", "sshd"]
