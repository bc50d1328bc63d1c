"""`horovod.data`: a base class for loaders and a mixin that reads ahead in a thread, without a framework."""

from __future__ import annotations

from paceline.compat.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
