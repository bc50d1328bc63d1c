# Python imports this module at its start (https://docs.python.org/3/library/site.html) in a worker and its child processes,
# because PYTHONPATH has this folder. It must work in any Python. It ends by running the next `sitecustomize`.
import os
import sys

if os.environ.get("PACELINE_RUN_DIR") and os.environ.get("PACELINE_RANK"):
    try:
        from paceline.worker import nested

        nested.begin_below()
    except Exception:  # this Python is too old, or has another release of Paceline: start without Paceline
        pass


def _next() -> None:
    from importlib import util
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [one for one in sys.path if os.path.abspath(one) != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = util.module_from_spec(spec)
        spec.loader.exec_module(module)


_next()
