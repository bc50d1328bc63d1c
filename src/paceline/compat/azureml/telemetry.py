"""`azureml.telemetry`: collects and sends nothing."""

from __future__ import annotations

import logging

__all__ = ["UserType", "get_diagnostics_collection_info", "get_telemetry_log_handler", "set_diagnostics_collection"]


class UserType:
    """Kinds of users."""

    INTERNAL, EXTERNAL = "internal", "external"


def set_diagnostics_collection(send_diagnostics: bool = True, *arguments: object, **named: object) -> None:
    """Do nothing: Paceline sends no diagnostics."""


def get_diagnostics_collection_info(*arguments: object, **named: object) -> tuple[bool, str]:
    """Return (False, ""): nothing is collected."""
    return False, ""


def get_telemetry_log_handler(*arguments: object, **named: object) -> logging.Handler:
    """Return a handler that discards all records."""
    return logging.NullHandler()
