# Python imports this module when it starts below a worker of a run (https://docs.python.org/3/library/site.html): the folder
# is on PYTHONPATH there. What is said here holds for any Python, of any version; the next module of this name follows.
import os
import sys

if os.environ.get("PACELINE_RUN_DIR") and os.environ.get("PACELINE_RANK"):
    try:
        from paceline.worker import nested

        nested.begin_below()
    except Exception:  # an interpreter that is too old, or has another Paceline: it runs as without
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
