"""Datastores: their records, their credentials, and the ways to reach them."""
