"""HOROVOD_LOG_LEVEL: the engine's messages on standard error."""

from __future__ import annotations

import logging
from collections.abc import Mapping

#: Horovod's names -> Python's levels.
_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
_NAME = "paceline.collectives"


def log_from(level: str, environ: Mapping[str, str]) -> None:
    """Show the engine's messages from this level on; the rank stands in front, and the time unless
    HOROVOD_LOG_HIDE_TIME is set. A level of another name changes nothing.
    """
    number = _LEVELS.get(level)
    if number is None:
        return
    logger = logging.getLogger(_NAME)
    logger.setLevel(number)
    # A second handler would show each message twice; a second call only sets the level.
    if logger.handlers:
        return
    time = "" if environ.get("HOROVOD_LOG_HIDE_TIME", "0") not in ("", "0") else "%(asctime)s "
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[{time}%(levelname)s] [{environ.get('HOROVOD_RANK', '0')}] %(message)s"))
    logger.addHandler(handler)
    # Otherwise a handler that the script has at the root would show each message again.
    logger.propagate = False
