"""Datastores: records, credentials and file systems."""
