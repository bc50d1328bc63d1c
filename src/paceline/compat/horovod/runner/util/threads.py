"""Helpers that run functions in threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn(*args)` in threads. Return the results by position in `args_list`.

    If `block_until_all_done` is False, return None without waiting for the calls.

    Raises:
        RuntimeError: A call has raised; its exception is the cause.
    """
    if not args_list:
        return {} if block_until_all_done else None
    if not block_until_all_done:
        # Start all threads at once, so that the caller need not wait. The semaphore limits how many threads run `call` at a time.
        turn = threading.Semaphore(max_concurrent_executions)

        def call(*args: Any) -> None:
            with turn:
                fn(*args)

        for args in args_list:
            in_thread(call, tuple(args))
        return None
    # At its end, the `with` block waits for all calls, even if one of them has raised an exception.
    with ThreadPoolExecutor(min(max_concurrent_executions, len(args_list))) as pool:
        calls = [pool.submit(fn, *args) for args in args_list]
    for done in calls:
        if (error := done.exception()) is not None:
            name = getattr(fn, "__name__", repr(fn))
            raise RuntimeError(f"Some threads for func {name} did not complete successfully: {error}") from error
    return {place: done.result() for place, done in enumerate(calls)}


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start and return a thread that runs `target(*args)`. `silent` drops `target`'s exceptions.

    Raises:
        ValueError: `args` is not a tuple.
    """
    _check_args(args)

    def quiet(*values: Any) -> None:
        with contextlib.suppress(BaseException):
            target(*values)

    thread = threading.Thread(target=quiet if silent else target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., object],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start and return a thread that runs `func(*args)` when the event is set.

    If `stop` is set before `event`, the thread ends without a call.

    Raises:
        ValueError: The event is missing, `args` is not a tuple, or `daemon` is False without `stop`.
    """
    if event is None:
        raise ValueError("Event must not be None")
    _check_args(args)
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def wait() -> None:
        if stop is None:
            event.wait()
        else:
            # A thread can't wait for two events at once, so wait for one event in short steps, and check the other.
            while not event.wait(check_stop_interval_s) and not stop.is_set():
                pass
        # If both events are set, `stop` has priority.
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def _check_args(args: Any) -> None:
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")
