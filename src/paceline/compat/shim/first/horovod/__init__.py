"""A package that makes `import horovod` load Paceline's package, if PYTHONPATH has its parent folder."""

import sys

from paceline.compat import install

install("horovod", force=True)

import paceline.compat.horovod as _own  # noqa: E402

# Replace this module by Paceline's in sys.modules: the statement `import horovod` then returns Paceline's module.
sys.modules[__name__] = _own
