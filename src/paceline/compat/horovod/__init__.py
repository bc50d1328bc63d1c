"""Horovod's functions on Paceline's collectives: `horovod.torch` in full, on today's PyTorch, without compilation.

    common/    the part without a framework: lifecycle, process sets, operation names, elastic state, timeline
    torch/     tensors, handles, autograd, DistributedOptimizer and the rest of `horovod.torch`
    runner/    `horovod.run` and the command `horovodrun`
    data/      loaders that read ahead in a thread
    aliases    the import hook for `import horovod...`

Scripts import this package as `horovod`, after `paceline.compat.install("horovod")`, or as `paceline.compat.horovod`.
docs/horovod.md lists the differences from Horovod with their reasons.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from paceline.compat.horovod.common import __version__ as __version__
from paceline.system.lazy_import import load_triton_before_tensorflow

#: Value of HOROVOD_LOG_LEVEL -> level of Python's logging.
_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


def run(*args: Any, **kwargs: Any) -> list[Any]:
    """Run a function on several ranks and return its results."""
    from paceline.compat.horovod import runner

    return runner.run(*args, **kwargs)


def _show_engine_log(environ: Mapping[str, str]) -> None:
    """Print the engine's log messages of level HOROVOD_LOG_LEVEL and above."""
    # Begin each line with the rank and, unless HOROVOD_LOG_HIDE_TIME is set, with the time.
    level = _LEVELS.get(environ.get("HOROVOD_LOG_LEVEL", "").upper())
    if level is None:
        return
    logger = logging.getLogger("paceline.collectives")
    logger.setLevel(level)
    # A reload of this module must not add a second handler, which would show each message twice.
    if logger.handlers:
        return
    time = "" if environ.get("HOROVOD_LOG_HIDE_TIME", "0") not in ("", "0") else "%(asctime)s "
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[{time}%(levelname)s] [{environ.get('HOROVOD_RANK', '0')}] %(message)s"))
    logger.addHandler(handler)
    # Don't propagate messages, because a handler of the script's root logger would show each message again.
    logger.propagate = False


# A script may use `horovod.tensorflow` and `horovod.torch`. If TensorFlow is loaded before torch's Triton, the process crashes.
load_triton_before_tensorflow()

# Install the handler now, because the engine may log messages as early as in `init`.
_show_engine_log(os.environ)
