"""Horovod's calls on Paceline's collectives: `horovod.torch` in full, on today's PyTorch, with nothing to compile.

    common/    what no framework is needed for: lifecycle, process sets, operations' names, elastic state, timeline
    torch/     tensors, handles, autograd, DistributedOptimizer and the rest of `horovod.torch`
    runner/    `horovod.run` and the command `horovodrun`
    data/      loaders that read ahead in a thread
    aliases    how `import horovod...` finds all this

Scripts import it as `horovod` (`paceline.compat.install("horovod")`) or by its own name. What differs from Horovod, and
why, is in docs/horovod.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.compat.horovod._version import __version__ as __version__
from paceline.system.lazy_import import load_triton_before_tensorflow


def run(*args: Any, **kwargs: Any) -> list[Any]:
    """The results of a function on several ranks, in order of rank; see `horovod.runner.call.run`."""
    # Imported on use: a script that trains calls no `run`, and has no need of the launcher's modules.
    from paceline.compat.horovod import runner

    return runner.run(*args, **kwargs)


def _log_as_asked(environ: Mapping[str, str]) -> None:
    """Let the engine's messages be seen from the level on that HOROVOD_LOG_LEVEL names; unset, Python's own way stays."""
    level = environ.get("HOROVOD_LOG_LEVEL", "").upper()
    if level:
        from paceline.compat.horovod.common.log import log_from

        log_from(level, environ)


# A script may use both of `horovod.tensorflow` and `horovod.torch`.
load_triton_before_tensorflow()

# At import, for the engine may speak as early as in `init`, and its logger has to have the handler by then.
_log_as_asked(os.environ)
