"""Helpers that scripts import from `horovod.common.util`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TypeVar

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.ops import handle_average_backwards_compatibility, is_power_of_two

__all__ = ["ccl_built", "check_extension", "ddl_built", "env", "extension_available", "gloo_built", "gpu_available"]
__all__ += ["handle_average_backwards_compatibility", "is_version_greater_equal_than", "mpi_built", "nccl_built"]
__all__ += ["num_rank_is_power_2", "split_list"]

T = TypeVar("T")

num_rank_is_power_2 = is_power_of_two


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether `horovod.<ext_base_name>` works."""
    return ext_base_name in ("torch", "tensorflow") and find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: object) -> None:
    """Check that the framework of an extension is installed.

    Raises:
        ImportError: The framework is missing.
    """
    base = ext_name.rpartition(".")[2]
    if not extension_available(base):
        raise ImportError(f"{ext_name} can't be used: {base} isn't installed, or Paceline has no {ext_name}.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework sees a GPU."""
    if ext_base_name == "torch":
        import torch

        return bool(torch.cuda.is_available())
    if ext_base_name == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    return False


def mpi_built(verbose: bool = False) -> bool:
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    return basics.ccl_built()


def split_list(l: list[T], n: int) -> list[list[T]]:  # noqa: E741
    """Split the list into `n` parts, longer ones first."""
    size, longer = divmod(len(l), n)
    ends = itertools.accumulate(size + (index < longer) for index in range(n))
    return [l[end - size - (index < longer) : end] for index, end in enumerate(ends)]


@contextlib.contextmanager
def env(**values: str | None) -> Iterator[None]:
    """Set environment variables within the block. The value None unsets a variable."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Return whether `version` is at least `target` ("2.1.0").

    Raises:
        ValueError: `target` has fewer than three numbers.
    """
    wanted = target.split(".")
    if len(wanted) < 3:
        raise ValueError(f"target={target!r} must have three numbers, as in '2.1.0'.")
    return _numbers(version) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    # Drop the name of a local build, such as "+cu118" in "2.1.0+cu118".
    for part in version.partition("+")[0].split(".")[:3]:
        digits = "".join(character for character in part if character.isdecimal())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _cache(function: Callable[..., T]) -> Callable[..., T]:
    return functools.lru_cache(maxsize=None)(function)
