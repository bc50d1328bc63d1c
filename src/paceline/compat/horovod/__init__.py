"""Horovod's calls on Paceline's collectives: `horovod.torch` in full, on today's PyTorch, with nothing to compile.

    common/    what no framework is needed for: lifecycle, process sets, operations' names, elastic state, timeline
    torch/     tensors, handles, autograd, DistributedOptimizer and the rest of `horovod.torch`
    aliases    how `import horovod...` finds all this

Scripts import it as `horovod` (`paceline.compat.install("horovod")`) or by its own name. What differs from Horovod, and
why, is in docs/horovod.md.
"""

from __future__ import annotations

from typing import NoReturn

#: The release whose interface this is; scripts compare it.
__version__ = "0.28.1"


def run(*_args: object, **_kwargs: object) -> NoReturn:
    """Raise: functions can't be started on several ranks from here yet.

    Raises:
        NotImplementedError: always; it says what to use.
    """
    raise NotImplementedError(
        "horovod.run isn't there in Paceline yet. Put the function's body into a script, and start it with "
        "`paceline run -j 1x<ranks> --backend mpi script.py`, or an estimator with distributed_backend='mpi'."
    )
