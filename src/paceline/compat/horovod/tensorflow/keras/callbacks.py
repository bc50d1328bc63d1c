"""`horovod.tensorflow.keras.callbacks`: what goes into `model.fit(callbacks=[...])`."""

from __future__ import annotations

from typing import Any

from paceline.compat.horovod._keras import libraries
from paceline.compat.horovod._keras.callbacks import classes_for

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

_classes = classes_for(libraries.of_tensorflow())
BestModelCheckpoint: Any = _classes.BestModelCheckpoint
BroadcastGlobalVariablesCallback: Any = _classes.BroadcastGlobalVariablesCallback
LearningRateScheduleCallback: Any = _classes.LearningRateScheduleCallback
LearningRateWarmupCallback: Any = _classes.LearningRateWarmupCallback
MetricAverageCallback: Any = _classes.MetricAverageCallback
