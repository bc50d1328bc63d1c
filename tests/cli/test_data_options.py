"""`--input` and `--output`: the references that they make, and the values that are refused."""

from __future__ import annotations

import pytest

from paceline.errors import DataError, JobError
from paceline.job.data_reference import DataReference, Source
from paceline.job_files.data_words import data_words


def lab(name: str, path: str, **values: object) -> DataReference:
    return DataReference(name=name, sources=(Source(datastore="lab", path=path),), **values)


@pytest.mark.parametrize(
    ("word", "reference"),
    [
        ("train=lab:mnist/train", lab("train", "mnist/train")),
        ("train=lab:", lab("train", "")),
        ("train=lab:/mnist/", lab("train", "mnist")),
        ("train=lab:a,b=c", lab("train", "a,b=c")),
        ("train=lab:mnist,download", lab("train", "mnist", mode="download")),
        ("train=lab:mnist,partition=rank", lab("train", "mnist", mode="download", partition="rank")),
        ("train=lab:a b/ü*,partition=node", lab("train", "a b/ü*", mode="download", partition="node")),
        ("x=https://example.org/a", DataReference(name="x", sources=(Source(path="https://example.org/a"),))),
    ],
)
def test_input_option_is_parsed_into_input_name_datastore_path_and_mode(word, reference):
    assert data_words([word], None) == (reference,)


def test_relative_local_path_of_an_input_option_is_made_absolute(tmp_path):
    (tmp_path / "da:ta").mkdir()
    (reference,) = data_words(["x=da:ta"], None)
    assert reference.sources == (Source(path=str(tmp_path / "da:ta")),)


def test_output_option_is_parsed_into_output_name_upload_path_and_overwrite_flag():
    assert data_words(None, ["model=lab:out/1"]) == (lab("model", "out/1", mode="upload"),)
    assert data_words(None, ["model=lab:out,overwrite"]) == (lab("model", "out", mode="upload", overwrite=True),)


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (["train"], None, "is not NAME=STORE:PATH or NAME=PATH"),
        (["train="], None, "is not NAME=STORE:PATH or NAME=PATH"),
        (["a b=lab:x"], None, "the name 'a b' of an input"),
        (["train=nowhere"], None, "there is no 'nowhere' here"),
        (["train=lab:x,overwrite"], None, "'overwrite' must be partition=rank"),
        (["train=lab:x,partition=worker"], None, "write partition=rank or partition=node"),
        (None, ["model=out"], "files are stored in a datastore"),
        (None, ["model=lab:x,download"], "'download' is not overwrite"),
    ],
)
def test_invalid_input_or_output_option_is_refused(inputs, outputs, said):
    with pytest.raises((JobError, DataError), match=said):
        data_words(inputs, outputs)
