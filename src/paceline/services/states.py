"""The states of a service, those of the Azure Machine Learning SDK where it has a word.

    Transitioning -> Healthy <-> Unhealthy -> Stopped | Failed

NotResponding is a reader's word: a service whose supervisor is gone, and which this reader can't start again.
"""

from __future__ import annotations

#: Its first server is being made ready.
TRANSITIONING = "Transitioning"
#: A server of it answers.
HEALTHY = "Healthy"
#: It has answered before, and its server is being started again.
UNHEALTHY = "Unhealthy"
#: Nothing of it can be started; an update may help.
FAILED = "Failed"
#: Somebody has stopped it.
STOPPED = "Stopped"
NOT_RESPONDING = "NotResponding"

#: Nobody looks after a service in one of these, and nobody has to.
AT_REST = frozenset({FAILED, STOPPED})
