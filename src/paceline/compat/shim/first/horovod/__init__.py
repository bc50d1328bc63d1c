"""`import horovod` in a process that has the folder above this one on its path: Paceline's own takes the name."""

import sys

from paceline.compat import install

install("horovod", force=True)

import paceline.compat.horovod as _own  # noqa: E402

# Whoever imports `horovod` is given this entry, not the module that is being executed here.
sys.modules[__name__] = _own
