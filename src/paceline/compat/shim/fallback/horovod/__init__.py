"""A package for programs that `horovodrun` starts: `import horovod` loads the real package if installed, else Paceline's.

PYTHONPATH precedes site-packages, so Python finds this file first. This file then searches for the real package.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Search sys.path without the folder that contains this package: otherwise the search would find this file again.
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
