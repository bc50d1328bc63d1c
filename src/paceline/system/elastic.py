"""What the supervisor and the workers of an elastic run tell each other, see docs/decisions/0018-elastic.md: names alone."""

from __future__ import annotations

import os

#: The fewest and the most nodes that the run may have: set in the workers of elastic runs alone.
MIN_NODES_VARIABLE = "PACELINE_ELASTIC_MIN_NODES"
MAX_NODES_VARIABLE = "PACELINE_ELASTIC_MAX_NODES"
#: Names a file that is there once the supervisor wants to go on with more nodes.
REQUEST_VARIABLE = "PACELINE_ELASTIC_REQUEST"
#: A worker ends so once its checkpoint is whole and it has seen the request. The codes to 78 are those of sysexits.h.
EXIT_RESIZE = 79


def is_resize_requested() -> bool:
    """True if the supervisor wants this attempt to end at its next checkpoint, to go on with more nodes.

    Ranks of one world may be told a moment apart: they have to agree on what one of them has seen.
    """
    path = os.environ.get(REQUEST_VARIABLE)
    return path is not None and os.path.exists(path)
