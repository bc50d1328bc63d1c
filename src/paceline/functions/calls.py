"""The form of calls and results on disk, and of short calls on the command line.

    <stem>.json          a value of JSON's types alone
    <stem>.safetensors   a value with arrays, tensors, tuples, sets or bytes: a checkpoint's format, which executes nothing
    <stem>.pickle        any value, only if the job asks for pickles

A call is {"args": [...], "kwargs": {...}}; several calls are a list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import JobError, RunStateError, UserError
from paceline.system.files import write_whole

#: A call of a function: its positional and its keyword arguments.
Call: TypeAlias = "tuple[Sequence[object], Mapping[str, object]]"

#: The longest call, in characters, that is passed on the command line. A longer call is passed in a file.
LONGEST_WORDS = 2000
#: Name, without suffix, of the file with the calls, in the folder `call` of the run.
CALLS = "calls"
#: Name, without suffix, of the file with the result, in the run's outputs.
RESULT = "result"
#: Folder in the run's outputs with the results of several calls. Each of the concurrent processes appends to a file of
#: its own, one JSON line for each call: its number (`call`), and its `value`, a `file` that holds it, or its `error`.
RESULTS = "results"
#: Key of the positional arguments in a dictionary that has a call's keyword arguments under their names.
_POSITIONAL = "*"


def result_stem(rank: int) -> str:
    """Return the file name of a rank's result, without its suffix."""
    return RESULT if rank == 0 else f"{RESULT}_{rank}"


def is_json(value: object) -> bool:
    """Return whether a value survives a round trip through JSON."""
    kind = type(value)
    if kind is list:
        return all(map(is_json, value))  # type: ignore[call-overload]
    if kind is dict:
        return all(type(key) is str and is_json(item) for key, item in value.items())  # type: ignore[attr-defined]
    return value is None or kind in (bool, int, float, str)


def words_of(call: Call) -> list[str] | None:
    """Return a call as command line words such as `--lr 0.1`.

    Return None if a value has no JSON form, or the words are too long. A string that is not valid JSON becomes an unquoted word.
    """
    args, kwargs = call
    given = {**({_POSITIONAL: list(args)} if args else {}), **kwargs}
    if not is_json(given):
        return None
    words = [word for name, value in given.items() for word in (f"--{name}", _word(value))]
    return words if sum(map(len, words)) <= LONGEST_WORDS and not any("\0" in word for word in words) else None


def _word(value: object) -> str:
    if (
        isinstance(value, str)
        and value
        and not value.startswith(("-", "="))
        and "$" not in value
        and value.isprintable()
    ):
        try:
            json.loads(value)
        except ValueError:
            return value
    # Escape "$", because the worker expands variables such as $HOME in its command-line arguments.
    return json.dumps(value).replace("$", "\\u0024")


def call_of(words: Sequence[str]) -> Call:
    """Parse a call from words such as `--lr 0.1`.

    Raises:
        JobError: The words are not pairs of `--name` and value.
    """
    names, values = words[::2], words[1::2]
    if len(words) % 2 or not all(name.startswith("--") for name in names):
        raise JobError(
            f"{' '.join(words)!r} are not arguments of a function: write each as --name value, the value as JSON."
        )
    kwargs = {name[2:]: _value(word) for name, word in zip(names, values, strict=True)}
    args = kwargs.pop(_POSITIONAL, [])
    return (args if isinstance(args, list) else [args]), kwargs


def _value(word: str) -> object:
    try:
        value: object = json.loads(word)
    except ValueError:
        return word
    return value


def make(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Call a job's function in this process, and return the result.

    Raises:
        RuntimeError: The function called `sys.exit`.
    """
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        raise RuntimeError(
            f"{function.__name__}() called sys.exit({error.code!r}). Return a result, or raise an exception."
        ) from error


def check_sendable(name: str, value: object, *, pickled: bool) -> None:
    """Raise JobError unless a value of a call can be stored and sent.

    name: Name of the value in the message, such as "train(): the argument 'config'". pickled: Whether it is stored as a pickle.
    """
    if pickled:
        _pickled(name, value)
    elif not is_json(value):
        _encoded(name, value)


def _pickled(name: str, value: object) -> bytes:
    import pickle  # imported in this function, because few jobs use pickles

    try:
        return pickle.dumps(value)
    except Exception as error:
        raise JobError(f"{name} can't be pickled: {type(error).__name__}: {error}") from error


def _encoded(name: str, value: object) -> tuple[object, dict[str, object]]:
    from paceline.checkpoint.api import encode_state

    try:
        return encode_state(value)
    except UserError as error:
        raise JobError(f"{name}{str(error).removeprefix('state')} Or use @paceline.job(pickle=True).") from error


def store(folder: Path, stem: str, name: str, value: object, *, pickled: bool, limit: int | None = None) -> str:
    """Store an argument or result, and return its file name.

    name: Name of the value in messages, such as "the result of train()".
    limit: Largest size in bytes. pickled: Whether to store a pickle.

    Raises:
        JobError: The value is too large or can't be stored.
        OSError: The file can't be written.
    """
    if pickled:
        data = _pickled(name, value)
        _check_size(name, len(data), limit)
        path = folder / f"{stem}.pickle"
        # Let no other user write to the file: `load` checks only the file's owner before it loads the pickle.
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "wb"
        ) as file:
            file.write(data)
        return path.name
    if is_json(value):
        text = json.dumps(value)
        _check_size(name, len(text), limit)
        write_whole(folder / f"{stem}.json", text + "\n")
        return f"{stem}.json"
    from paceline.checkpoint.api import DenseArray, write_file

    state, arrays = _encoded(name, value)
    try:
        dense = [DenseArray(at, array) for at, array in arrays.items()]
    except UserError as error:
        raise JobError(f"{name}: {error}") from error
    _check_size(name, sum(array.size for array in dense) + len(json.dumps(state)), limit)
    write_file(folder / f"{stem}.safetensors", state, dense, durable=False)
    return f"{stem}.safetensors"


def _check_size(name: str, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise JobError(
            f"{name} has {size:,} bytes, and max_result allows {limit:,}. Write it to a file in the folder "
            "PACELINE_OUTPUT_DIR and return the file's name, or raise max_result."
        )


def is_stored(folder: Path, stem: str) -> bool:
    """Return whether the folder has a value with this file name (`stem`)."""
    return any((folder / f"{stem}.{kind}").exists() for kind in ("json", "safetensors", "pickle"))


def load(folder: Path, stem: str, *, pickled: bool) -> Any:
    """Read an argument or result that `store` wrote.

    pickled: Whether a pickle may be loaded, which must belong to this user or to root.

    Raises:
        RunStateError: There is no such file, the file can't be read, or it is a pickle that may not be loaded.
    """
    path = folder / f"{stem}.json"
    try:
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        if (path := folder / f"{stem}.safetensors").exists():
            from paceline.checkpoint.api import CheckpointFile, decode_state

            file = CheckpointFile(path)
            return decode_state(file.state, file.array)
        if not (path := folder / f"{stem}.pickle").exists():
            raise FileNotFoundError("there is no such file")
        if not pickled:
            raise ValueError("it is a pickle, which the job has not asked for (pickle=True)")
        import pickle

        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as opened:
            if os.fstat(fd).st_uid not in (os.geteuid(), 0):
                raise PermissionError("it belongs to another user, and a pickle can start programs as you")
            return pickle.load(opened)
    except Exception as error:
        raise RunStateError(f"{str(path)!r} can't be read: {error}") from error
