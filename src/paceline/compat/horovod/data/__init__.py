"""`horovod.data`: a base for loaders, and a mixin that reads ahead in a thread. Knows no framework."""

from __future__ import annotations

from paceline.compat.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
