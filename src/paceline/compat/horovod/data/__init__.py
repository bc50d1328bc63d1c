"""`horovod.data`: loaders with a thread that reads ahead while the script works on a batch.

class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    def _iterate(self): ...

class Loader(AsyncDataLoaderMixin, torch.utils.data.DataLoader): ...
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

#: Seconds between two checks whether `close` was called. The loading thread and the script's loop over batches both check this.
_TICK_S = 0.1
#: `close` waits at most this many seconds for the batch that the background thread is loading.
_CLOSE_S = 5.0

#: Readers whose threads are running. The references are weak, but a running thread keeps its reader alive.
_living: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


class BaseDataLoader:
    """Base class of data loaders. A subclass yields batches in `_iterate`."""

    def __len__(self) -> int:
        """Raise TypeError; a subclass returns the number of batches."""
        # Raise TypeError, which `list(loader)` ignores when it calls `__len__`.
        raise TypeError(f"{type(self).__name__} has no __len__; define it to return the number of batches.")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _iterate(self) -> Iterable[Any]:
        raise NotImplementedError(
            f"{type(self).__name__} has no _iterate; define it to yield the batches of one epoch."
        )

    def _process_batch(self, batch: Any) -> Any:
        """Return the unchanged batch. A subclass may convert it, in the script's thread."""
        return batch


class AsyncDataLoaderMixin:
    """A mixin that reads batches ahead in a thread.

    `async_loader_queue_size` is the maximum number of batches that are read ahead, or 0 to read none ahead. All other
    arguments go to the loader. Each loop over the loader has its own thread, which ends with the loop. If the thread
    raises an exception, the loop raises this exception. List this class before the loader's class.
    """

    def __init_subclass__(cls, **values: Any) -> None:
        super().__init_subclass__(**values)
        bases = cls.__mro__
        # Find base classes whose `__iter__` hides the mixin's `__iter__`, which then never runs.
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
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        own = getattr(self, "_iterate", None)
        # A loader without `_iterate`, such as torch's DataLoader, yields its batches from its own __iter__.
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
            # If the script leaves its loop early, Python closes this generator, and this line closes the reader.
            reader.close()
            self._async_readers.remove(reader)

    def close_async_loader(self) -> None:
        """End the loops' threads after the batches that they are loading."""
        for reader in list(self._async_readers):
            reader.close()


class Prefetcher:
    """An iterator over an iterable, whose thread reads `size` items ahead."""

    def __init__(self, items: Iterable[Any], size: int) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(size)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(items,), name="paceline-read-ahead", daemon=True)
        _living.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while not self._closed.is_set():
            try:
                kind, value = self._queue.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def close(self) -> None:
        """Stop the thread, which ends after its current batch."""
        self._closed.set()
        # A thread can't join itself, and the iterable may close the reader in the reader's own thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _read(self, items: Iterable[Any]) -> None:
        try:
            iterator = iter(items)
            try:
                for item in iterator:
                    if not self._put("item", item):
                        break
            finally:
                # If the iterator is a generator, close it in this thread, in which it has run.
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:
            self._put("error", error)
        else:
            self._put("end", None)

    def _put(self, kind: str, value: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put((kind, value), timeout=_TICK_S)
            except queue.Full:
                continue
            return True
        return False


@atexit.register
def _close_all() -> None:
    """Stop the threads, which otherwise may crash the interpreter's exit."""
    for reader in list(_living):
        reader.close()


# Let `from horovod.data import data_loader_base` return this module.
data_loader_base = sys.modules[__name__]
