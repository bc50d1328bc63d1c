"""Parse the words of `--input` and `--output`, which name data."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paceline.errors import JobError
from paceline.job.data_reference import PARTITIONS, DataReference, Source
from paceline.system.names import did_you_mean

# `lab:mnist` is a path in the store "lab". `s3://bucket` is a URL, not a path in a store "s3".
_STORE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*):(?!//)(.*)", re.DOTALL)


def data_words(inputs: list[str] | None, outputs: list[str] | None) -> tuple[DataReference, ...]:
    """Return the data references that words such as `train=lab:mnist/train,partition=rank` describe."""
    return tuple([_input(word) for word in inputs or ()] + [_output(word) for word in outputs or ()])


def absolute_word(option: str, word: str, base: Path | None = None) -> str:
    """Return the option value NAME=PATH with PATH made absolute, relative to `base`."""
    name, path, _ = _split(option, word)
    whole = os.path.join(base or Path.cwd(), os.path.expanduser(path))
    # A local file called `lab:x` has priority over the path `x` in a store called "lab".
    if "://" in path or (_STORE.fullmatch(path) and not os.path.exists(whole)):
        return word
    return f"{name}={os.path.abspath(whole)}{word[len(name) + 1 + len(path) :]}"


def _input(word: str) -> DataReference:
    name, path, options = _split("--input", word)
    reference = DataReference(name=name, sources=(_source(path),))
    for option in options:
        key, _, value = option.partition("=")
        if key == "partition":
            if value not in PARTITIONS:
                raise JobError(
                    f"--input {word!r}: write partition=rank or partition=node, not {option!r}.{did_you_mean(value, PARTITIONS)}"
                )
            reference = reference.as_partition(by="rank" if value == "rank" else "node")
        elif option in ("mount", "download"):
            reference = reference.as_mount() if option == "mount" else reference.as_download()
        else:
            raise JobError(f"--input {word!r}: {option!r} must be partition=rank, partition=node, mount or download.")
    return reference


def _output(word: str) -> DataReference:
    name, path, options = _split("--output", word)
    if unknown := [option for option in options if option != "overwrite"]:
        raise JobError(f"--output {word!r}: {unknown[0]!r} is not overwrite, which is all there is.")
    found = _STORE.fullmatch(path)
    if found is None:
        raise JobError(
            f"--output {word!r}: files are stored in a datastore. Write NAME=STORE:PATH; `paceline data list` shows them."
        )
    source = Source(datastore=found[1], path=found[2].strip("/"))
    return DataReference(name=name, sources=(source,), mode="upload", overwrite="overwrite" in options)


def _split(option: str, word: str) -> tuple[str, str, list[str]]:
    name, equals, rest = word.partition("=")
    # A comma begins an option only if one of the known options follows. Other commas belong to the path.
    path, *options = re.split(r",(?=partition=|mount$|download$|overwrite$|mount,|download,|overwrite,)", rest)
    if not equals or not path:
        raise JobError(f"{option} {word!r} is not NAME=STORE:PATH or NAME=PATH, such as train=lab:mnist/train.")
    return name, path, options


def _source(text: str) -> Source:
    found = _STORE.fullmatch(text)
    if found and not Path(text).exists():
        return Source(datastore=found[1], path=found[2].strip("/"))
    if "://" in text:
        return Source(path=text)
    # A pattern such as `/data/*.csv` is not the name of a file, so the file need not exist.
    if not Path(text).expanduser().exists() and not set(text) & set("*?["):
        raise JobError(f"there is no {text!r} here. Name a file, a folder, a URL, or STORE:PATH for a datastore's.")
    return Source(path=os.path.abspath(os.path.expanduser(text)))
