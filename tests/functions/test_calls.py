from __future__ import annotations

import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError, RunStateError
from paceline.functions import calls

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@given(args=st.lists(JSON, max_size=3), kwargs=st.dictionaries(NAMES, JSON, max_size=3))
def test_arguments_of_a_function_call_are_equal_after_encoding_as_command_line_words(args, kwargs):
    words = calls.words_of((args, kwargs))
    if words is not None:
        assert all("$" not in word and "\0" not in word for word in words)
        assert calls.call_of(words) == (args, kwargs)


@pytest.mark.parametrize(
    ("value", "word"),
    [("adam", "adam"), ("0.1", '"0.1"'), ("-x", '"-x"'), ("", '""'), (0.1, "0.1"), ("$HOME", '"\\u0024HOME"')],
)
def test_plain_argument_values_are_readable_on_the_command_line(value, word):
    assert calls.words_of(([], {"x": value})) == ["--x", word]


def test_long_call_or_tuple_argument_is_not_put_on_the_command_line():
    assert calls.words_of(([], {"x": "a" * calls.LONGEST_WORDS})) is None
    assert calls.words_of(([], {"x": (1, 2)})) is None


@pytest.mark.parametrize("words", [["--lr"], ["lr", "1"]])
def test_call_arguments_on_the_command_line_that_are_not_name_value_pairs_are_refused(words):
    with pytest.raises(JobError, match="write each as --name value"):
        calls.call_of(words)


@pytest.mark.parametrize(
    ("value", "suffix"), [({"a": [1, None, "x"]}, "json"), ((1, {2}, b"x"), "safetensors"), ({1: 2.5}, "safetensors")]
)
def test_result_value_is_equal_after_storing_it_in_a_file_and_loading_it(tmp_path, value, suffix):
    assert calls.store(tmp_path, "v", "x", value, pickled=False) == f"v.{suffix}"
    found = calls.load(tmp_path, "v", pickled=False)
    assert found == value
    assert type(found) is type(value)


def test_arrays_keep_dtype_and_shape_after_storing_and_loading_a_file(tmp_path):
    numpy = pytest.importorskip("numpy")
    value = {"w": numpy.arange(6, dtype="float32").reshape(2, 3), "n": numpy.float64(2.5)}
    calls.store(tmp_path, "v", "x", value, pickled=False)
    found = calls.load(tmp_path, "v", pickled=False)
    assert found["w"].dtype == numpy.float32
    assert found["w"].tolist() == value["w"].tolist()
    assert found["n"] == 2.5


def test_result_value_of_an_unsupported_class_is_refused_and_its_position_is_named_in_the_error(tmp_path):
    with pytest.raises(
        JobError, match=r"the result\['model'\] is a builtins.object, which can't be stored.*pickle=True"
    ):
        calls.store(tmp_path, "v", "the result", {"model": object()}, pickled=False)


@pytest.mark.parametrize("pickled", [False, True])
def test_result_value_larger_than_max_result_is_refused_and_leaves_no_file(tmp_path, pickled):
    with pytest.raises(JobError, match="max_result allows 100"):
        calls.store(tmp_path, "v", "the result", "a" * 101, pickled=pickled, limit=100)
    assert os.listdir(tmp_path) == []


class Opener:
    def __reduce__(self):
        return os.mkdir, ("opened",)


@pytest.mark.promise("pickle-loaded-only-if-asked")
def test_pickled_value_is_not_loaded_without_permission_of_the_job_or_through_a_symlink(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.pickle").write_bytes(pickle.dumps(Opener()))
    with pytest.raises(RunStateError, match="has not asked for"):
        calls.load(tmp_path, "v", pickled=False)
    os.rename("v.pickle", "w")
    os.symlink("w", "v.pickle")
    with pytest.raises(RunStateError, match="can't be read"):
        calls.load(tmp_path, "v", pickled=True)
    assert not (tmp_path / "opened").exists()


@pytest.mark.promise("pickle-loaded-only-if-asked")
def test_pickle_of_another_user_is_not_loaded(tmp_path, monkeypatch):
    calls.store(tmp_path, "v", "x", {1}, pickled=True)
    assert calls.load(tmp_path, "v", pickled=True) == {1}
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0:
        os.chown(tmp_path / "v.pickle", 12345, -1)
    with pytest.raises(RunStateError, match="belongs to another user"):
        calls.load(tmp_path, "v", pickled=True)


def test_truncated_result_file_raises_an_error(tmp_path):
    (tmp_path / "v.json").write_text('{"a": ')
    with pytest.raises(RunStateError, match=r"v\.json"):
        calls.load(tmp_path, "v", pickled=False)


def test_sys_exit_in_a_submitted_function_is_reported_as_an_error():
    with pytest.raises(RuntimeError, match=r"leave\(\) called sys.exit\(0\)"):
        calls.make(leave, (), {})


def leave():
    raise SystemExit(0)
