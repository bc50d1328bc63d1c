"""Loaders that read ahead: the next batches are made in a thread while the script works on this one.

class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    def _iterate(self): ...

class Loader(AsyncDataLoaderMixin, torch.utils.data.DataLoader): ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.compat.horovod.data.prefetch import Prefetcher


class BaseDataLoader:
    """A loader is made by `_iterate`, which yields the batches of one epoch, and perhaps `__len__`."""

    def __len__(self) -> int:
        """The number of batches."""
        # A TypeError, as of any object without a length: `list(loader)` asks for a hint, and goes on without.
        raise TypeError(f"{type(self).__name__} has no __len__; define it to return the number of batches.")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _iterate(self) -> Iterable[Any]:
        raise NotImplementedError(
            f"{type(self).__name__} has no _iterate; define it to yield the batches of one epoch."
        )

    def _process_batch(self, batch: Any) -> Any:
        """The batch as the script gets it; called where the script runs (moving it to a GPU, for example)."""
        return batch


class AsyncDataLoaderMixin:
    """Reads ahead; stands before the loader's class among the bases.

    async_loader_queue_size: how many batches are read ahead at most; 0 reads none. All other arguments are the loader's.
    Each epoch has a thread of its own, which ends with it, or when the script leaves the loop: nothing of an epoch is
    read before the loop over it has begun. An exception in the thread is raised where the script asks for the batch.
    """

    def __init_subclass__(cls, **values: Any) -> None:
        super().__init_subclass__(**values)
        bases = cls.__mro__
        # Their `__iter__` is found before the mixin's, which then never runs.
        before = [base for base in bases[1 : bases.index(AsyncDataLoaderMixin)] if "__iter__" in vars(base)]
        if before and not any(issubclass(base, AsyncDataLoaderMixin) for base in before):
            warnings.warn(
                f"{cls.__name__} reads nothing ahead: {before[0].__name__} stands before AsyncDataLoaderMixin among its bases. "
                f"Write class {cls.__name__}(AsyncDataLoaderMixin, {before[0].__name__}).",
                stacklevel=2,
            )

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        if not isinstance(async_loader_queue_size, int) or async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size={async_loader_queue_size!r} must be a whole number from 0 on. "
                "It is the first argument, before the loader's own; or name it."
            )
        self.async_loader_queue_size = async_loader_queue_size
        self._async_readers: list[Prefetcher] = []
        # The mixin stands before the loader, so this is the loader's own constructor.
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        own = getattr(self, "_iterate", None)
        # A loader that knows nothing of this mixin, such as torch's, has its batches in its own __iter__.
        batches = own() if own is not None else super().__iter__()  # type: ignore[misc]
        process = getattr(self, "_process_batch", lambda batch: batch)
        if self.async_loader_queue_size == 0:
            for batch in batches:
                yield process(batch)
            return
        reader = Prefetcher(batches, self.async_loader_queue_size)
        self._async_readers.append(reader)
        try:
            for batch in reader:
                yield process(batch)
        finally:
            # Also where the script leaves the loop early: Python closes the generator then.
            reader.close()
            self._async_readers.remove(reader)

    def close_async_loader(self) -> None:
        """End the threads that read ahead; a loop that still goes on ends with the batch that it has."""
        # A copy, for a loop that ends meanwhile takes its reader out of the list.
        for reader in list(self._async_readers):
            reader.close()
