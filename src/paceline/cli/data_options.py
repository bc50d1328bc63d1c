"""`--input` and `--output`: data in the words of the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paceline.errors import JobError
from paceline.job.data_reference import PARTITIONS, DataReference, Source
from paceline.system.names import did_you_mean

# `lab:mnist` is in the store lab; `s3://bucket` is a URL, and no path in a store s3.
_STORE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*):(?!//)(.*)", re.DOTALL)


def data_words(inputs: list[str] | None, outputs: list[str] | None) -> tuple[DataReference, ...]:
    """The references that the words stand for: `train=lab:mnist/train,partition=rank`, `data=/data/mnist`.

    Raises:
        JobError, DataError: a word that is none of these.
    """
    return tuple([_input(word) for word in inputs or ()] + [_output(word) for word in outputs or ()])


def absolute_word(option: str, word: str, base: Path | None = None) -> str:
    """The word with an absolute path where it names a file or folder of this machine. base: what relative ones start from.

    Raises:
        JobError: it is not NAME=PLACE.
    """
    name, path, _ = _split(option, word)
    whole = os.path.join(base or Path.cwd(), os.path.expanduser(path))
    # A file of this machine may be called `lab:x`; it goes before a store of the name lab, as in `_source`.
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
            raise JobError(
                f"--input {word!r}: {option!r} is none of partition=rank, partition=node, mount and download."
            )
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
    # At a comma with one of the options behind it: any other belongs to the path.
    path, *options = re.split(r",(?=partition=|mount$|download$|overwrite$|mount,|download,|overwrite,)", rest)
    if not equals or not path:
        raise JobError(f"{option} {word!r} is not NAME=STORE:PATH or NAME=PATH, such as train=lab:mnist/train.")
    return name, path, options


def _source(text: str) -> Source:
    """`lab:mnist` is in a datastore; `https://...` and a path on this machine are what they are."""
    found = _STORE.fullmatch(text)
    if found and not Path(text).exists():
        return Source(datastore=found[1], path=found[2].strip("/"))
    if "://" in text:
        return Source(path=text)
    # A pattern such as `/data/*.csv` is the name of no file.
    if not Path(text).expanduser().exists() and not set(text) & set("*?["):
        raise JobError(f"there is no {text!r} here. Name a file, a folder, a URL, or STORE:PATH for a datastore's.")
    return Source(path=os.path.abspath(os.path.expanduser(text)))
