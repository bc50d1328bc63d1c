"""`horovod.data`: loaders that read ahead."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from paceline.compat.horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from tests.helpers import run_python, wait_until


class Numbers(BaseDataLoader):
    """Yields numbers and records them; raises at `bad`."""

    def __init__(self, count, bad=None):
        self.count, self.bad, self.made, self.ended = count, bad, [], 0

    def __len__(self):
        return self.count

    def _iterate(self):
        try:
            for number in range(self.count):
                if number == self.bad:
                    raise ValueError("bad batch")
                self.made.append((number, threading.current_thread()))
                yield number
        finally:
            self.ended += 1


class Ahead(AsyncDataLoaderMixin, Numbers):
    def _process_batch(self, batch):
        assert threading.current_thread() is threading.main_thread()
        return batch * 10


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "paceline-read-ahead"]


@pytest.fixture(scope="module")
def collecting_is_quick():
    """What other tests have loaded, perhaps TensorFlow, is not looked at in each collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_thread_is_left(collecting_is_quick):
    yield
    gc.collect()
    wait_until(lambda: not readers(), "the threads have ended", 30)


def test_iterating_a_data_loader_yields_its_items_in_order():
    assert list(Numbers(3)) == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1, 2, 64])
def test_batches_are_equal_for_each_queue_size(size):
    loader = Ahead(size, 5)
    assert len(loader) == 5
    assert list(loader) == [0, 10, 20, 30, 40]
    assert list(loader) == [0, 10, 20, 30, 40], "again, for the next epoch"


def test_prefetch_thread_reads_at_most_the_queue_size():
    loader = Ahead(async_loader_queue_size=2, count=100)
    batches = iter(loader)
    assert next(batches) == 0
    wait_until(lambda: len(loader.made) == 4, "two wait in the queue, one in the thread's hand")
    time.sleep(0.05)
    assert len(loader.made) == 4
    assert {thread for _, thread in loader.made} == set(readers())
    batches.close()


def test_queue_size_0_starts_no_thread():
    loader = Ahead(0, 3)
    list(loader)
    assert {thread for _, thread in loader.made} == {threading.main_thread()}


def test_async_loader_does_not_prefetch_the_next_epoch():
    loader = Ahead(64, 3)
    list(loader)
    time.sleep(0.05)
    assert len(loader.made) == 3


@pytest.mark.parametrize("size", [0, 1, 64])
def test_loader_exception_is_raised_at_its_batch(size):
    seen = []
    with pytest.raises(ValueError, match="bad batch") as caught:
        seen.extend(Ahead(size, 5, bad=2))
    assert seen == [0, 10]
    assert any(entry.name == "_iterate" for entry in caught.traceback), "the loader's own frame"


def test_leaving_the_loop_ends_the_thread_and_closes_the_generator():
    loader = Ahead(2, 1000)
    for batch in loader:
        if batch == 30:
            break
    gc.collect()
    wait_until(lambda: loader.ended == 1, "the generator was closed")
    wait_until(lambda: not readers(), "the thread has ended")
    assert next(iter(loader)) == 0, "the next loop begins anew"


def test_closing_the_loader_ends_its_running_loop():
    loader = Ahead(2, 1000)
    seen = []
    for batch in loader:
        seen.append(batch)
        loader.close_async_loader()
    assert seen == [0]
    loader.close_async_loader()


def test_two_concurrent_loops_each_get_all_batches():
    loader = Ahead(4, 5)
    assert list(zip(loader, loader, strict=True)) == [(n, n) for n in (0, 10, 20, 30, 40)]


def test_async_mixin_works_with_torchs_data_loader():
    torch = pytest.importorskip("torch")

    class Loader(AsyncDataLoaderMixin, torch.utils.data.DataLoader):
        pass

    loader = Loader(2, torch.arange(6), batch_size=2, shuffle=False)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert len(loader) == 3


def test_async_mixin_after_the_loader_base_class_warns_with_the_right_order():
    with pytest.warns(UserWarning, match=r"Write class Wrong\(AsyncDataLoaderMixin, BaseDataLoader\)"):

        class Wrong(Numbers, AsyncDataLoaderMixin):
            pass


@pytest.mark.parametrize("size", [-1, 1.5, "4", None])
def test_invalid_queue_size_is_refused(size):
    with pytest.raises(ValueError, match=r"async_loader_queue_size=.* must be a whole number"):
        Ahead(size, 3)


def test_missing_loader_methods_raise_errors_that_name_them():
    with pytest.raises(NotImplementedError, match="BaseDataLoader has no _iterate"):
        list(BaseDataLoader())
    with pytest.raises(TypeError, match="no __len__"):
        len(BaseDataLoader())


def test_program_exits_although_a_loop_is_unfinished():
    code = (
        "from paceline.compat.horovod.data import AsyncDataLoaderMixin, BaseDataLoader\n"
        "class L(AsyncDataLoaderMixin, BaseDataLoader):\n"
        "    def _iterate(self):\n        while True: yield b'x' * 1000\n"
        "kept = iter(L(4)); next(kept); print('end')\n"
    )
    assert run_python(code) == "end\n"


def test_importing_horovod_data_loads_no_framework():
    code = "import paceline.compat.horovod.data, sys; print([n for n in ('torch', 'numpy', 'tensorflow') if n in sys.modules])"
    assert run_python(code) == "[]\n"
