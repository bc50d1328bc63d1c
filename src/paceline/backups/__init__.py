"""Backups of a workspace in a datastore: incremental, verified, and made while runs go on."""
