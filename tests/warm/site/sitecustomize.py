"""Hands a script over to the program that has its libraries loaded (tests/warm). Read by each Python that has this folder in
PYTHONPATH, at its start."""

import os
import sys


def _hand_over(socket, words, **how):
    """Have it run by the program at this socket, in this process's place."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from hand_over import hand_over

    hand_over(socket, words, hides=True, frees=False, **how)


def _hand_over_worker():
    """A run's worker, in whatever environment it is to run: for those whose own packages are none of what is loaded."""
    socket, words = os.environ.get("FORKED_WORKERS"), sys.orig_argv[1:]
    if socket and words and words[0].endswith("paceline/worker/__main__.py"):
        _hand_over(socket, words, python=sys.executable, send=os.killpg, path=list(sys.path))


def _hand_over_script():
    (python, _, socket), words = os.environ.get("FORKED_SCRIPTS", "").partition(os.pathsep), sys.orig_argv[1:]
    is_unbuffered = words[:1] == ["-u"]
    words = words[is_unbuffered:]
    is_script = bool(words) and (words[0].endswith(".py") or os.path.basename(words[0]) == "torchrun")
    if not is_script or python != sys.executable or "PYTHONHASHSEED" in os.environ:
        return
    if is_unbuffered:
        os.environ["PYTHONUNBUFFERED"] = "1"
    _hand_over(socket, words)


_hand_over_script()
_hand_over_worker()
