"""A package that makes `import horovod` load Paceline's package, if PYTHONPATH has its parent folder."""

import sys

from paceline.compat import install

install("horovod", force=True)

import paceline.compat.horovod as _own  # noqa: E402

# The import statement returns this entry of sys.modules, not the module that this file defines.
sys.modules[__name__] = _own
