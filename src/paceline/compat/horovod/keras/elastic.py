"""`horovod.keras.elastic`: training that continues after a failed collective."""

from __future__ import annotations

from paceline.compat.horovod._keras import settings
from paceline.compat.horovod._keras.module import elastic_names_for

_names = elastic_names_for(settings.standalone())
__all__ = list(_names)
globals().update(_names)
