"""`import horovod` in what `horovodrun` starts: the real package where it is installed, else Paceline's.

The folder above stands before site-packages on the path (PYTHONPATH can do no other), so it looks further itself.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Without the folder above this one, where only this file would be found again.
_spec = PathFinder.find_spec("horovod", [place for place in sys.path if os.path.abspath(place) != _here])

if _spec is not None and _spec.loader is not None:
    _real = module_from_spec(_spec)
    sys.modules[__name__] = _real
    _spec.loader.exec_module(_real)
else:
    from paceline.compat import install

    install("horovod", force=True)

    import paceline.compat.horovod as _own

    sys.modules[__name__] = _own
